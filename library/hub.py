"""One artifact as a repository in the layout of Hugging Face kernels: `build/VARIANT/` with a Python front,
metadata and the signed bundle.

The front imports nothing that travels with it: the machine code stays data in the bundle, which is verified
against the user's own trust store before a byte is kept, and the runtime loads it as any other artifact.
"""

from __future__ import annotations

import base64
import hashlib
import json
import keyword
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper_ir.diagnostics import EsperError
from library import dsse, rows
from library.bundle import export_bundle, import_bundle, read_file
from library.errors import fail
from library.manifest import blueprint_document, tensors
from library.paths import os_error, refuse_inside
from library.records import SUPERSEDED, VALIDATED, ArtifactRecord
from library.store import Library

BUNDLE = "artifact.esper"
BACKENDS = {"cuda": "cuda", "hip": "rocm", "cpu": "cpu"}
_CARD = re.compile(r"sm_(\d+)(\d)([af]?)\Z")
_FRONT = '''\
"""{title}: Esper artifact {artifact}.

`{name}(...)` runs it on tensors in the order of its arguments; `load(...)` gives the module with parameters
of its own (`runtime.load`). Both refuse by name what your trust store does not vouch for.
"""

from pathlib import Path

try:
    import runtime
    from library.hub import take
except ImportError as error:
    raise ImportError("this kernel runs through Esper: pip install esper-forge") from error

artifact_id = take(Path(__file__).with_name("{bundle}"), "{artifact}")
_block = runtime.load(artifact_id, functional=True)


def {name}({arguments}):
    """{title}, forward and backward."""
    return _block({arguments})


def load(**options):
    """The artifact as a module with its own parameters; options as of `runtime.load`."""
    return runtime.load(artifact_id, **options)

{layers}
__all__ = [{exported}]
'''
_LAYERS = '''\
"""The layer for `kernelize`: it has no state and uses the parameters of the module whose place it takes."""

from torch import nn

from . import {name} as _call


class {layer}(nn.Module):
    """Parameters expected on the module: {expected}."""

    can_torch_compile = True
    has_backward = {backward!r}

    def forward(self{inputs}):
        return _call({values})
'''
_CARD_TEXT = """\
---
license: {license}
library_name: kernels
tags:
- kernel
---

# {title}

Esper artifact `{artifact}`: {target}, {pipeline} pipeline, proven by the key below. The code is data in
`build/*/{bundle}`; it is verified before it is used, not imported.

```python
from kernels import get_kernel

kernel = get_kernel("ORGANISATION/{title}", version=1, trust_remote_code=True)
y = kernel.{name}({arguments})
```

It needs `pip install esper-forge` and trust in the keys that signed it:

```console
$ esper-library trust add compiler {compiler}
$ esper-library trust add validator {validator}
```
"""


@dataclass(frozen=True)
class Front:
    """What the Python text is made of: names that are identifiers, whatever the blueprint called things."""

    title: str
    name: str
    layer: str
    arguments: tuple[str, ...]
    kinds: tuple[str, ...]
    parameters: tuple[str, ...]
    backward: bool
    license: str

    @property
    def has_layer(self) -> bool:
        """Constants have no place on the module that a layer stands in for; odd names cannot be reached."""
        parts = [part for name in self.parameters for part in name.split(".")]
        return "constant" not in self.kinds and all(_plain(part) for part in parts)


def export_kernel(lib: Library, record: ArtifactRecord, place: Path) -> Path:
    """Write the variant of a proven artifact below `place`, whole or not at all; its directory.

    Other variants may be there already. E0740 to E0743 for what would not load, E0720 where this one exists.
    """
    refuse_inside(place, lib.home, lib.trust.home)
    loaded = lib.load(record.id)
    manifest = loaded.container.manifest
    backend = BACKENDS[record.kind]
    front, variant = front_of(manifest), place / "build" / f"torch-{backend}"
    if os.path.lexists(variant):
        raise fail("E0720", f"{variant} exists already", node=str(variant), hint="give another directory")
    staged = variant.with_name(f".{variant.name}.{uuid.uuid4().hex}")
    try:
        staged.mkdir(parents=True)
        export_bundle(lib, [record], staged / BUNDLE)
        (staged / BUNDLE).chmod(0o644)
        for name, text in _files(record, front).items():
            (staged / name).write_text(text, encoding="utf-8")
        (staged / "metadata.json").write_text(_metadata(record, front, backend, staged), encoding="utf-8")
        _write_card(lib, record, front, loaded.verdict.keyid if loaded.verdict else "", place)
        os.rename(staged, variant)
    except OSError as error:
        raise os_error(error, "cannot write", variant) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return variant


def front_of(manifest: Mapping[str, Any]) -> Front:
    """Names for the Python text of an artifact."""
    title = _title(manifest["blueprint"]["name"])
    interface, leaves = manifest["launch"].get("interface"), tensors(manifest)
    notes = blueprint_document(manifest).get("metadata")
    stated = notes.get("license") if isinstance(notes, dict) else None
    return Front(
        title,
        _identifier(title.replace("-", "_"), ("load", "runtime", "take", "layers", "artifact_id")),
        _identifier("".join(part.capitalize() for part in title.split("-"))),
        _identifiers(name for name, _ in leaves),
        tuple(kind for _, kind in leaves),
        tuple(name for name, kind in leaves if kind != "input"),
        isinstance(interface, dict) and bool(interface.get("differentiable")),
        stated if isinstance(stated, str) and re.fullmatch(r"[A-Za-z0-9 .+()-]{1,64}", stated) else "other",
    )


def _title(name: str) -> str:
    """A kernel's name: lower case, digits and dashes, a letter first."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64].strip("-")
    return text if re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", text) else f"esper-{text or 'kernel'}"


def _plain(name: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)) and not keyword.iskeyword(name)


def _identifier(name: str, taken: Iterable[str] = ()) -> str:
    text = re.sub(r"[^A-Za-z0-9_]", "_", name)[:200]
    text = text if _plain(text) else f"_{text}"
    used = set(taken)
    while text in used:
        text += "_"
    return text


def _identifiers(names: Iterable[Any]) -> tuple[str, ...]:
    made: list[str] = []
    for name in names:
        made.append(_identifier(str(name), (*made, "self", "_block", "_call")))
    return tuple(made)


def _files(record: ArtifactRecord, front: Front) -> dict[str, str]:
    arguments = ", ".join(front.arguments)
    layers = ("layers",) if front.has_layer else ()
    exported = ", ".join(f'"{name}"' for name in (front.name, "load", "artifact_id", *layers))
    imported = "\nfrom . import layers  # noqa: E402\n" if front.has_layer else ""
    shared = {"title": front.title, "artifact": record.id, "name": front.name, "bundle": BUNDLE}
    files = {"__init__.py": _FRONT.format(**shared, arguments=arguments, layers=imported, exported=exported)}
    if front.has_layer:
        files["layers.py"] = _layer_text(front)
    return files


def _layer_text(front: Front) -> str:
    given = [a for a, kind in zip(front.arguments, front.kinds, strict=True) if kind == "input"]
    inputs = "".join(f", {name}" for name in given)
    values = ", ".join([*given, *(f"self.{name}" for name in front.parameters)])
    return _LAYERS.format(
        name=front.name,
        layer=front.layer,
        expected=", ".join(front.parameters) or "none",
        backward=front.backward,
        inputs=inputs,
        values=values,
    )


def _metadata(record: ArtifactRecord, front: Front, backend: str, staged: Path) -> str:
    card = _CARD.match(record.arch)
    archs = {"archs": [f"{card[1]}.{card[2]}{card[3]}"]} if card and backend == "cuda" else {}
    digests = {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(staged.iterdir())
    }
    document = {
        "name": front.title,
        "id": f"_{front.title.replace('-', '_')}_{backend}_{record.version[:8]}",
        "version": 1,
        "license": front.license,
        "python-depends": [],
        "backend": {"type": backend, **archs},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return json.dumps(document, indent=2) + "\n"


def _write_card(lib: Library, record: ArtifactRecord, front: Front, validator: str, place: Path) -> None:
    card = place / "README.md"
    if os.path.lexists(card):
        return
    document = lib.trust.document()
    envelope = rows.provenance_envelope(lib.index, record.id)
    signed = dsse.open_envelope(envelope, dsse.IN_TOTO, document.role_keys("compiler")).keyids[0]
    publics = {
        role: f"esper-ed25519:{role}:{base64.b64encode(document.keys[keyid]).decode()}"
        for role, keyid in (("compiler", signed), ("validator", validator))
    }
    text = _CARD_TEXT.format(
        license=front.license,
        title=front.title,
        artifact=record.id,
        target=record.target,
        pipeline=record.pipeline,
        bundle=BUNDLE,
        name=front.name,
        arguments=", ".join(front.arguments),
        **publics,
    )
    card.write_text(text, encoding="utf-8")


def take(bundle: Path, artifact_id: str, library: Path | str | None = None) -> str:
    """Have the artifact of a downloaded bundle in the user's library, verified; its id. Writes only if it is
    not there yet. Errors as of `import_bundle`, and E0770 for a bundle of something else.
    """
    if not _has(artifact_id, library):
        with Library.open(library, roles=()) as lib:
            # A download is a link into a cache of files; what it holds is verified either way.
            import_bundle(lib, read_file(Path(os.path.realpath(bundle))))
    if not _has(artifact_id, library):
        raise fail("E0770", f"{bundle} does not prove {artifact_id}", node=artifact_id)
    return artifact_id


def _has(artifact_id: str, library: Path | str | None) -> bool:
    try:
        with Library.open(library, readonly=True) as lib:
            known = rows.artifact(lib.index, artifact_id)
    except EsperError as error:
        if error.code != "E0701":
            raise
        return False
    return known is not None and known.state in (VALIDATED, SUPERSEDED)
