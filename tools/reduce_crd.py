"""Cuts the published schema of a Kubernetes resource down to what our manifests touch.

    python tools/reduce_crd.py CRD.yaml VERSION MANIFEST.yaml > tests/schedulers/schemas/KIND.json

Of every object that the manifest has, all field names stay, so that a misspelt one is found; what lies below fields
that the manifest does not have is cut off, and so are all descriptions. Needs PyYAML.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

# Descriptions, and rules in a language of Kubernetes' own.
_CUT = ("description", "default", "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys")


def reduced(schema: dict[str, Any], used: Any) -> dict[str, Any]:
    """The schema without descriptions, down to what `used` has; unknown fields are refused, as kubectl does."""
    kept = {name: value for name, value in schema.items() if name not in (*_CUT, "properties", "items")}
    fields = schema.get("properties")
    if isinstance(used, list) and "items" in schema:
        # One schema for all items: what any of them has.
        merged = merge(used)
        kept["items"] = reduced(schema["items"], merged)
    elif isinstance(used, dict) and fields is not None:
        kept["properties"] = {
            name: reduced(inner, used[name]) if name in used else {} for name, inner in sorted(fields.items())
        }
        kept["additionalProperties"] = False
    elif isinstance(used, dict) and isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduced(schema["additionalProperties"], merge(list(used.values())))
    return kept


def merge(values: list[Any]) -> Any:
    """What any of these values has, in one value."""
    if all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: merge([value[name] for value in values if name in value]) for name in names}
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    return values[0]


def main(crd: str, version: str, manifest: str) -> None:
    """Prints the schema as JSON."""
    definition = yaml.safe_load(Path(crd).read_text())
    kind = definition["spec"]["names"]["kind"]
    published = next(v for v in definition["spec"]["versions"] if v["name"] == version)
    used = next(d for d in yaml.safe_load_all(Path(manifest).read_text()) if d["kind"] == kind)
    print(json.dumps(reduced(published["schema"]["openAPIV3Schema"], used), indent=1, sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
