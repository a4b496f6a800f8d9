"""Rendering, and the commands around it."""

from __future__ import annotations

import pytest

from tools import prometheus_rule
from tools.k8s_check import __main__ as command
from tools.k8s_check import rendering
from tools.k8s_check.manifests import Finding
from tools.k8s_check.rendering import Variant, render, variants


def test_what_cannot_be_rendered_is_said_in_kustomizes_own_words():
    with pytest.raises(RuntimeError, match="no-such-overlay"):
        render(Variant("no-such-overlay"))


def test_what_kustomize_warns_of_is_an_error(monkeypatch, tmp_path):
    """It warns of what a later release refuses, and exits with 0."""
    (tmp_path / "overlays/old").mkdir(parents=True)
    (tmp_path / "overlays/old/kustomization.yaml").write_text("commonLabels: {a: b}\n")
    monkeypatch.setattr(rendering, "K8S", tmp_path)
    with pytest.raises(RuntimeError, match="deprecated"):
        render(Variant("old"))


def test_a_component_is_never_laid_over_itself_nor_over_less_than_it_needs():
    found = {str(variant) for variant in variants()}
    assert {"cpu", "gpu", "minimal", "minimal + autoscaling", "cpu + autoscaling-by-load", "gpu + monitoring"} <= found
    assert not [name for name in found if name.startswith(("cpu", "gpu")) and "autoscaling" in name.split(" + ")]
    assert "minimal + autoscaling-by-load" not in found


@pytest.mark.parametrize(("findings", "code"), [([], 0), ([Finding("Service/x", "is wrong")], 1)])
def test_the_command_says_what_is_wrong_with_what_and_fails(monkeypatch, capsys, findings, code):
    monkeypatch.setattr(command, "variants", lambda: [Variant("minimal")])
    monkeypatch.setattr(command, "check", lambda _cluster: findings)
    assert command.main() == code
    said = capsys.readouterr().out
    assert ("error: minimal: Service/x: is wrong" in said) is bool(findings)
    assert f"k8s: 1 variants of the overlays, {len(findings)} problems" in said


def test_a_rule_file_that_changed_is_noticed_until_the_object_is_written_anew(monkeypatch, tmp_path, capsys):
    rules, target = tmp_path / "rules.yml", tmp_path / "rules.yaml"
    monkeypatch.setattr(prometheus_rule, "ROOT", tmp_path)
    monkeypatch.setattr(prometheus_rule, "RULES", rules)
    monkeypatch.setattr(prometheus_rule, "TARGET", target)
    rules.write_text("groups:\n  - name: a\n")
    assert prometheus_rule.main([]) == 0
    assert prometheus_rule.main(["--check"]) == 0
    rules.write_text("groups:\n  - name: b\n")
    assert prometheus_rule.main(["--check"]) == 1
    assert "rules.yaml is not made of today's rules" in capsys.readouterr().out
