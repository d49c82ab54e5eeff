"""Reading runs of older versions of the library.

Before fields of execution had a record of their own, a run's config.json kept them beside the architecture:

* ``model``: dtype, scan, remat, save, attention_kernel and the rates of dropout, now in ``model.execution`` (save is
  remat_save);
* ``model.experts``: number, now n_experts; dispatch, capacity, balance_loss, z_loss and balance_rate, now in
  ``model.execution`` as expert_dispatch, expert_capacity, balance_loss, router_z_loss and balance_rate;
* ``data.separate`` and ``train.keep``, now data.segment_documents and train.keep_checkpoints.

Checkpoints need no migration: the trees of parameters and of optimizer states are the same.
"""

from typing import Any

FROM_MODEL = {name: name for name in ("dtype", "scan", "remat", "attention_kernel")}
FROM_MODEL |= {name: name for name in ("attention_dropout", "residual_dropout", "embedding_dropout")}
FROM_MODEL |= {"save": "remat_save"}
FROM_EXPERTS = {
    "dispatch": "expert_dispatch",
    "capacity": "expert_capacity",
    "balance_loss": "balance_loss",
    "z_loss": "router_z_loss",
    "balance_rate": "balance_rate",
}


def migrated(values: dict[str, Any]) -> dict[str, Any]:
    """The content of a run's config.json, with today's names of fields. Already current content is returned as it is."""
    model = values.get("model")
    if not isinstance(model, dict) or "execution" in model:
        return values
    model, experts = dict(model), model.get("experts")
    execution = _taken(model, FROM_MODEL)
    if isinstance(experts, dict):
        experts = dict(experts)
        execution |= _taken(experts, FROM_EXPERTS)
        model["experts"] = _renamed(experts, "number", "n_experts")
    values = values | {"model": model | {"execution": execution}}
    for record, old, new in (("data", "separate", "segment_documents"), ("train", "keep", "keep_checkpoints")):
        if isinstance(values.get(record), dict):
            values[record] = _renamed(values[record], old, new)
    return values


def _taken(record: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """What ``record`` has under the old names, by the new ones; taken out of it."""
    return {new: record.pop(old) for old, new in names.items() if old in record}


def _renamed(record: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in record.items()}
