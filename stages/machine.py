"""What the machine has left, and whether a stage's work fits: said before it starts, not by the system hours later."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage

import psutil
import torch

from stages.errors import InputError

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


CPU = torch.device("cpu")


def check_memory(what: str, needed: float, smaller: str, device: torch.device = CPU) -> None:
    """`InputError` where `needed` bytes for each process of this machine are more than what is free there."""
    if device.type == "cuda":
        where, free = "GPU memory", torch.cuda.mem_get_info(device)[0]
    else:
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # said by torchrun and accelerate
        where, free = "memory", free_memory()
    if needed > free:
        raise InputError(f"{what} about {_said(needed)} of {where}, and {_said(free)} are free; smaller by {smaller}")


def check_disk(what: str, needed: int, work: Path, smaller: str, kept: bool = True) -> None:
    """`InputError` where the disk of the folder `work` has not `needed` bytes, what is written there counted.

    DVC keeps a second copy of what a stage has made, except where both can be one on disk, or DVC has it not `kept`.
    """
    here = _there(work)
    wanted = {here: needed - _size_of(work)}
    if (cache := _cache_of_copies(here) if kept else None) is not None:
        same = here.stat().st_dev == cache.stat().st_dev
        wanted[here if same else cache] = wanted.get(here, 0) * same + needed
    for place, bytes_there in wanted.items():
        free = disk_usage(place).free
        if bytes_there > free:
            copy = ", a copy in DVC's cache included" if cache is not None else ""
            raise InputError(
                f"{what} {_said(bytes_there)} of disk{copy}, and {_said(free)} are free at {place.resolve()}; "
                f"smaller by {smaller}"
            )


def give_back_memory() -> None:
    """Free pages between those in use go back to the system, where the C library has a call for that (glibc's).

    Tensors of ever other sizes leave holes in its heap, which then grows with the length of the work.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def free_memory() -> int:
    """Bytes that a process can still get: those of the system, or of its control group (a container) if fewer."""
    system: int = psutil.virtual_memory().available + psutil.swap_memory().free
    return max(0, min([system, *_left_in_groups()]))


def _left_in_groups() -> Iterator[int]:
    """What the limit of each control group above this process leaves, in either version of them."""
    if not OWN_GROUPS.is_file():  # no Linux
        return
    for line in OWN_GROUPS.read_text(encoding="utf-8").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, limit, used, cache = GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            top, (limit, used, cache) = GROUPS / "memory", names
        else:
            continue
        own = top / name.strip("/")
        # In a container the name may be that of the host: only what is there is asked.
        for group in (own, *own.parents[: len(own.parts) - len(top.parts)]):
            most = _number(group / limit)
            if most is not None:
                kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield most - (_number(group / used) or 0) + int(kept.get(cache, 0))


def _number(file: Path) -> int | None:
    """`None` where there is no such file, or no limit in it."""
    said = file.read_text(encoding="utf-8").strip() if file.is_file() else "max"
    return None if said == "max" else int(said)


def _size_of(folder: Path) -> int:
    size = 0
    for root, _, files in os.walk(folder):  # which passes over a folder that another process renames meanwhile
        for name in files:
            with suppress(FileNotFoundError):  # another process finishes it
                size += Path(root, name).stat().st_size
    return size


def _there(folder: Path) -> Path:
    """It, or the folder above that is there."""
    return folder if folder.is_dir() else _there(folder.absolute().parent)


def _cache_of_copies(folder: Path) -> Path | None:
    """DVC's cache where DVC runs this stage and will copy what it makes in `folder`, as it can do nothing cheaper."""
    if "DVC_ROOT" not in os.environ:
        return None
    from dvc.config import Config  # where DVC runs, and only there
    from dvc.fs import system

    root = Path(os.environ["DVC_ROOT"], ".dvc")
    settings = Config(str(root))["cache"]
    cache = _there(root / settings.get("dir", "cache"))
    first = settings.get("type", ["reflink"])[0]
    if first == "reflink":
        with tempfile.TemporaryDirectory(dir=folder) as tried, tempfile.TemporaryDirectory(dir=cache) as there:
            Path(tried, "file").write_bytes(b"tried")
            try:
                system.reflink(Path(tried, "file"), Path(there, "file"))
            except OSError:
                return cache
    return cache if first == "copy" or folder.stat().st_dev != cache.stat().st_dev else None


def widest(model: torch.nn.Module) -> int:
    """Numbers for each token that leave the widest Linear of a model."""
    return max([module.out_features for module in model.modules() if isinstance(module, torch.nn.Linear)], default=0)


def _said(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
