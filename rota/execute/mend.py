"""Writes the model of a finished task again where its file is lost or damaged: its last checkpoint has the weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rota.errors import CheckpointError, CorruptCheckpointError, RunFolderError
from rota.store.run_folder import CHECKPOINT_FOLDER, STORE_FOLDER, RunFolder


def mend_model(folder: RunFolder, task: str, *, shards: Iterable[str]) -> None:
    """Write a task's model; RunFolderError if no checkpoint has it. `shards` are the run's places beside its folder."""
    from rota.memory import keeping
    from rota.state import checkpoint  # they need torch, and most runs have nothing to mend

    def use(tree: Any) -> None:
        if not isinstance(tree, dict) or not isinstance(tree.get("training"), dict) or "model" not in tree["training"]:
            raise CorruptCheckpointError("is not what rota writes")
        if tree.get("task", {"name": task})["name"] != task:
            raise CorruptCheckpointError("belongs to another task")

    path = folder.model(task)
    try:
        found = checkpoint.read_latest(folder.task(task) / CHECKPOINT_FOLDER, notice=None, use=use)
        tree = None if found is None else found.tree
        for place in (*(Path(one) / task for one in shards), folder.task(task)):
            if tree is None and (place / STORE_FOLDER).is_dir():
                tree = keeping.read_latest(place / STORE_FOLDER, notice=None, use=use)
        if tree is not None:
            checkpoint.write_model(path, tree["training"]["model"])
            return
        why = "none of its checkpoints is whole"
    except CheckpointError as error:
        why = str(error)
    raise RunFolderError(
        f"the trained model {path} of the finished task {task!r} is missing or damaged, and cannot be written again "
        f"({why}); put a copy of it back, or train it in a new run"
    )
