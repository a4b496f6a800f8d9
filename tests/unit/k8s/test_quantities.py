"""Kubernetes' quantities."""

import pytest

from tools.k8s_check.quantities import parse


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("500m", 0.5), ("1.5Gi", 1610612736), ("1G", 10**9), ("1e3", 1000), ("12E", 12 * 10**18), ("1Ei", 2**60), (".5", 0.5)],
)
def test_a_quantity_is_the_number_that_it_stands_for(text, value):
    assert float(parse(text)) == value


@pytest.mark.parametrize("text", ["", "1GB", "1 Gi", "Gi", "1.5.2", "0x10", "1gi", "1K"])
def test_what_kubernetes_refuses_is_refused(text):
    with pytest.raises(ValueError, match="is no quantity"):
        parse(text)
