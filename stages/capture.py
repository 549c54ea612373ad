"""Capture the feature vectors of the chosen texts at every capture point, in one forward pass each.

    python -m stages.capture
    torchrun --nproc-per-node 4 -m stages.capture

The unit of work is a shard of rows: a process computes the texts that reach into its
shards and writes each shard of each store once. Writes `features/activations/`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stages.arithmetic.kernels import use
from stages.command import run_stage
from stages.errors import InputError
from stages.machine import check_disk, check_memory, widest
from stages.models.capture_points import recording, widths
from stages.models.encoding import Reading, batches_by_tokens, encode, padded, readings
from stages.models.families import family_of
from stages.models.loading import check_max_length, load_classifier, load_tokenizer
from stages.outputs import activations as store
from stages.outputs.checkpoints import FINETUNED
from stages.outputs.files import CHECKED, writing
from stages.parameters import CaptureParameters, Parameters
from stages.resume import clear, publish, unfinished_folder
from stages.reviews.chosen import chosen_texts
from stages.sites import POINTS, Site

TEXTS_AT_ONCE = 1000
NAMED = 5  # texts in one warning
FLOAT32 = 4  # bytes
AT_ONCE = 3  # of what a layer computes beside its features, and of one store's shard on its way to the disk

Tensor = torch.Tensor
Lengths = npt.NDArray[np.int64]


def main(parameters: Parameters) -> None:
    use(parameters.arithmetic)
    capture_texts(parameters, chosen_texts(parameters.capture), FINETUNED)


def capture_texts(parameters: Parameters, texts: dict[str, str], checkpoint: Path) -> None:
    """Write `features/activations/` of `texts`, by name, in the model that lies at `checkpoint`."""
    capture = parameters.capture
    check_max_length("capture.max_length", capture.max_length, checkpoint)
    state = PartialState(cpu=not torch.cuda.is_available())
    tokenizer = load_tokenizer(checkpoint)
    classifier: Any = load_classifier(checkpoint)
    base: PreTrainedModel = classifier.base_model.to(state.device)
    wanted = _wanted(base, capture.points)

    folder = unfinished_folder("capture", parameters)
    if state.is_main_process:
        if not (folder / "stores").is_dir():  # new, or killed after its stores were published
            shutil.rmtree(folder / "done", ignore_errors=True)
        starts_decoder = base.config.decoder_start_token_id if base.config.is_encoder_decoder else None
        store.write_texts(folder / "stores", texts)
        lengths = _write_tokens(folder, tokenizer, texts, capture.max_length, starts_decoder)
        plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype)
        _check_room(base, wanted, plan, lengths, capture, folder)
        if not (folder / "done").is_dir():
            store.create_stores(folder / "stores", list(wanted), plan, wanted)
            (folder / "done").mkdir()
        np.save(folder / "lengths.npy", lengths)
    state.wait_for_everyone()
    lengths = np.load(folder / "lengths.npy")
    plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype)

    own = [unit for unit in range(plan.units) if unit % state.num_processes == state.process_index]
    left = [unit for unit in own if not (folder / "done" / str(unit)).exists()]
    work = _Capture(base, tokenizer, list(texts.values()), lengths, plan, wanted, capture)
    work.units(left, folder)
    state.wait_for_everyone()
    if state.is_main_process:
        publish(folder / "stores", store.ACTIVATIONS)
        clear(folder)
        logging.info("captured %d tokens of %d texts at %d points", plan.tokens, len(texts), len(wanted))


def _wanted(base: PreTrainedModel, points: Sequence[str]) -> dict[Site, int]:
    """The sites to capture and their widths; why a point is absent is said, and `InputError` where all are."""
    family = family_of(base.config)
    for point in points:
        if point in family.absent():
            logging.info("%s: absent in the model family %s: %s", point, family.model_type, family.absent()[point])
    if not family.present(points):
        raise InputError(
            f"capture.points: the model family {family.model_type} has none of {', '.join(points)}; "
            f"allowed: {', '.join(family.present(POINTS))}"
        )
    return widths(base, points)


def _check_room(
    base: PreTrainedModel,
    wanted: Mapping[Site, int],
    plan: store.StorePlan,
    lengths: Lengths,
    capture: CaptureParameters,
    folder: Path,
) -> None:
    """`InputError` where the disk has no room for the stores, or the memory none for the work on one shard."""
    what = f"capture: {plan.tokens} tokens at {len(wanted)} points need"
    smaller = "capture.points, capture.documents, capture.max_length or capture.dtype"
    tables = sum(path.stat().st_size for path in (folder / "stores").glob("*.parquet"))  # written before
    check_disk(what, tables + sum(map(plan.size, wanted.values())), folder / "stores", smaller)

    tokens = max(_largest_batch(lengths, plan.rows_of(unit), capture.batch_tokens) for unit in range(plan.units))
    forward = FLOAT32 * tokens * AT_ONCE * widest(base)
    row = min(2, plan.units) * sum(wanted.values()) + AT_ONCE * max(wanted.values())  # one is written behind
    shard = np.dtype(plan.dtype).itemsize * plan.unit_rows * row
    what = f"capture: {tokens} tokens in a forward pass and {plan.unit_rows} in a shard, at {len(wanted)} points, need"
    smaller = f"capture.batch_tokens, {smaller}"
    if base.device.type == "cuda":
        check_memory(what, forward, smaller, base.device)
        check_memory(what, shard, smaller)
    else:
        check_memory(what, forward + shard, smaller)


def _largest_batch(lengths: Lengths, rows: slice, batch_tokens: int) -> int:
    """Padded tokens of the largest forward pass for `rows`."""
    reach: list[int] = lengths[_reach(lengths, rows)].tolist()
    return max(len(batch) * reach[batch[-1]] for batch in batches_by_tokens(reach, batch_tokens))


def _reach(lengths: Lengths, rows: slice) -> list[int]:
    """The texts that reach into `rows`."""
    ends = np.cumsum(lengths)
    return list(map(int, np.flatnonzero((ends > rows.start) & (ends - lengths < rows.stop))))


def _write_tokens(
    folder: Path, tokenizer: PreTrainedTokenizerFast, texts: dict[str, str], max_length: int, starts_decoder: int | None
) -> Lengths:
    """Write the tokens table a block of texts at a time; the number of tokens of each text.

    A decoder beside an encoder sees the tokens one later, after `starts_decoder`: `decoder_token`.
    """
    fields = [("document", pa.string()), ("position", pa.int32()), ("token_id", pa.int32()), ("token", pa.string())]
    schema = pa.schema(fields if starts_decoder is None else [*fields, ("decoder_token", pa.string())])
    names = list(texts)
    lengths: list[int] = []
    with writing(store.tokens_file(folder / "stores")) as path, pq.ParquetWriter(path, schema, **CHECKED) as writer:
        for start in range(0, len(names), TEXTS_AT_ONCE):
            block = names[start : start + TEXTS_AT_ONCE]
            encoded = encode(tokenizer, [texts[name] for name in block], max_length)
            _warn(dict(zip(block, readings(tokenizer, [texts[name] for name in block], max_length), strict=True)))
            ids = [token for text in encoded for token in text]
            columns = [
                [name for name, text in zip(block, encoded, strict=True) for _ in text],
                [position for text in encoded for position in range(len(text))],
                ids,
                tokenizer.convert_ids_to_tokens(ids),
            ]
            if starts_decoder is not None:
                seen = [token for text in encoded for token in (starts_decoder, *text[:-1])]
                columns.append(tokenizer.convert_ids_to_tokens(seen))
            writer.write_table(pa.table(dict(zip(schema.names, columns, strict=True)), schema=schema))
            lengths += map(len, encoded)
    return np.asarray(lengths, dtype=np.int64)


def _warn(read: Mapping[str, Reading]) -> None:
    """Say which texts the model does not see whole, or hardly knows a word of."""
    for said, names in (
        ("cut to capture.max_length", [f"{name} ({each.whole} tokens)" for name, each in read.items() if each.is_cut]),
        ("mostly tokens that the model does not know", [name for name, each in read.items() if each.is_unknown]),
    ):
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            logging.warning("%s: %s%s", said, ", ".join(names[:NAMED]), more)


class _Capture:
    """Forward passes whose features go into blocks of a store's rows, in the store's dtype."""

    def __init__(
        self,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        texts: Sequence[str],
        lengths: Lengths,
        plan: store.StorePlan,
        widths: Mapping[Site, int],
        capture: CaptureParameters,
    ) -> None:
        self.base, self.tokenizer, self.texts, self.lengths = base, tokenizer, texts, lengths
        self.starts = np.cumsum(lengths) - lengths
        self.plan, self.widths, self.capture = plan, widths, capture

    def units(self, units: Sequence[int], folder: Path) -> None:
        """Compute and write them; one is written while the next is computed, so two are in memory at most."""
        rows = {unit: self.plan.rows_of(unit) for unit in units}
        total = sum(each.stop - each.start for each in rows.values())
        with (
            tqdm(total=total, desc="capture", unit="token", unit_scale=True, disable=None) as progress,
            ThreadPoolExecutor(1) as behind,
        ):
            written: Future[None] | None = None
            for unit, rows_of_unit in rows.items():
                blocks = self.features(rows_of_unit, progress)
                if written:
                    written.result()
                written = behind.submit(_write, folder, unit, rows_of_unit, blocks)
            if written:
                written.result()

    def features(self, rows: slice, progress: tqdm[Any]) -> dict[Site, Tensor]:
        """`[rows, width]` of every site, from every text that reaches into `rows`."""
        size, dtype = rows.stop - rows.start, getattr(torch, self.plan.dtype)
        blocks = {site: torch.empty((size, width), dtype=dtype) for site, width in self.widths.items()}
        reach = _reach(self.lengths, rows)
        encoded = encode(self.tokenizer, [self.texts[i] for i in reach], self.capture.max_length)
        first = self.starts[reach] - rows.start
        places: list[tuple[int, slice, slice]] = []  # in the batch: number of the text, its tokens, their rows

        def keep(site: Site, feature_BTD: Tensor) -> None:
            cast = feature_BTD.to(dtype)
            if not cast.sum(dtype=torch.float32).isfinite():  # no value, or one of padding
                for place, tokens, _ in places:
                    store.check_fits(feature_BTD[place, tokens].float().cpu().numpy(), site, self.plan.dtype)
            for place, tokens, rows_of_text in places:
                blocks[site][rows_of_text] = cast[place, tokens]

        device = self.base.device
        half = torch.autocast(device.type, dtype=torch.bfloat16) if self.capture.precision == "bf16" else None
        with torch.inference_mode(), recording(self.base, self.capture.points, taken=keep), half or nullcontext():
            for batch in batches_by_tokens([len(text) for text in encoded], self.capture.batch_tokens):
                places.clear()
                for place, i in enumerate(batch):
                    low, high = max(first[i], 0), min(first[i] + len(encoded[i]), size)
                    places.append((place, slice(low - first[i], high - first[i]), slice(low, high)))
                self.base(**padded([encoded[i] for i in batch], self.tokenizer.pad_token_id, device))
                progress.update(sum(rows_of_text.stop - rows_of_text.start for _, _, rows_of_text in places))
        return blocks


def _write(folder: Path, unit: int, rows: slice, blocks: dict[Site, Tensor]) -> None:
    for site in list(blocks):
        store.write_block(folder / "stores", site, rows, blocks.pop(site).numpy())
    (folder / "done" / str(unit)).touch()


if __name__ == "__main__":
    run_stage(main)
