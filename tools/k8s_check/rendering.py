"""Renders overlays with kubectl's own kustomize."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("cpu", "gpu", "minimal")


@dataclass(frozen=True, slots=True)
class Variant:
    """An overlay with components laid over it, as a user would combine them."""

    overlay: str
    components: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " + ".join((self.overlay, *self.components))


def variants() -> Iterator[Variant]:
    """Each overlay as it is, with each component that it does not have yet and that goes with it, and with all of them."""
    for overlay in OVERLAYS:
        yield Variant(overlay)
        own = _components(overlay)
        # What lies over another component needs that one.
        usable = [name for name in components() if name not in own and (name != "autoscaling-by-load" or "autoscaling" in own)]
        yield from (Variant(overlay, (name,)) for name in usable)
        yield Variant(overlay, tuple(usable))


def components() -> list[str]:
    """Names of all components."""
    return sorted(path.name for path in (K8S / "components").iterdir() if (path / "kustomization.yaml").exists())


def _components(overlay: str) -> set[str]:
    """What an overlay has, its base's included."""
    folder = K8S / "overlays" / overlay
    described = yaml.safe_load((folder / "kustomization.yaml").read_text())
    own = {Path(path).name for path in described.get("components") or []}
    bases = [(folder / path).resolve() for path in described.get("resources") or []]
    return own.union(*(_components(base.name) for base in bases if base.parent == K8S / "overlays"))


def render(variant: Variant) -> str:
    """The manifests as YAML. Raises RuntimeError with kustomize's own words."""
    if not variant.components:
        return kustomize(K8S / "overlays" / variant.overlay)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        description = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "tokenloom",
            # kustomize takes no absolute paths.
            "resources": [os.path.relpath(K8S / "overlays" / variant.overlay, folder)],
            "components": [os.path.relpath(K8S / "components" / name, folder) for name in variant.components],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(description))
        return kustomize(folder)


def kustomize(folder: Path) -> str:
    """A folder with a kustomization, as YAML. Raises RuntimeError with kustomize's own words."""
    command: Sequence[str] = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr.strip():  # its warnings are about what will be an error
        raise RuntimeError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    return done.stdout
