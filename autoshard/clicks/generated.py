"""Generated clicks with a planted signal, for any tables: what could be learned is known.

Ids come from each table's own distribution. A hidden logistic model gives the label:

    logit = bias + signal · (Σ_f mean over the bag of effect[f, id] / √F + x · w) / √2

with an effect for every row of every feature and weights w of the numeric features, all
standard normal up to scale, so that the signal's standard deviation is about `signal` where
bags hold one id. Effects are computed from the row's number, so any table size costs no
memory. The hidden model itself gives the best AUC and log-loss that any model can reach.

Shapes: F=features, B=samples, L=ids, N=numeric features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtri

from autoshard.clicks.batches import ClickBatch, ClickData, IntArray, Share, num_steps
from autoshard.clicks.drawing import DrawnFeatures, draw_features, smallest_tables
from autoshard.errors import InputError
from autoshard.tables import Table

NAME = "clicks"
#: Samples that are drawn together, whoever reads them.
_BLOCK_SIZE = 1024
#: First word of the generators' seeds: what is drawn.
_TRAIN, _EVALUATION, _MODEL = 0, 1, 2


def generated_clicks(
    tables: Sequence[Table],
    *,
    samples: int = 65_536,
    evaluation_samples: int = 8_192,
    numeric: int = 4,
    signal: float = 2.0,
    seed: int = 0,
) -> ClickData:
    """Make up clicks for the tables of a plan.

    Args:
        tables: any.
        samples: in an epoch; every epoch draws fresh ones.
        evaluation_samples: always the same.
        numeric: N, numeric features, standard normal; 0 for none.
        signal: how clear the labels are; with 0 they are chance.
        seed: of the hidden model and of all samples.

    Raises:
        InputError: an option is out of range.
    """
    if samples < 1 or evaluation_samples < 1 or numeric < 0 or not 0 <= signal < 100:
        raise InputError(
            "the options of generated clicks are not usable",
            got=f"samples {samples}, evaluation_samples {evaluation_samples}, "
            f"numeric {numeric}, signal {signal}",
            allowed="at least 1 sample of each kind, numeric >= 0, signal in [0, 100)",
        )
    model = HiddenModel(tables, num_numeric=numeric, signal=signal, seed=seed)
    return ClickData(
        name=NAME,
        feature_names=tuple(smallest_tables(tables)),
        num_numeric=numeric,
        train=GeneratedSplit(tables, model, samples, stream=_TRAIN, seed=seed),
        evaluation=GeneratedSplit(tables, model, evaluation_samples, stream=_EVALUATION, seed=seed),
        description=f"generated clicks, seed {seed}: {samples:,} samples per epoch, "
        f"{evaluation_samples:,} to evaluate on, signal {signal:g}",
    )


class HiddenModel:
    """The logistic model that gives the labels."""

    def __init__(
        self, tables: Sequence[Table], *, num_numeric: int, signal: float, seed: int
    ) -> None:
        """Fix the model for a seed; nothing is stored per row."""
        self.num_numeric = num_numeric
        self._signal = signal
        generator = np.random.default_rng([_MODEL, seed])
        self.bias = float(generator.normal(-0.5, 0.2))
        self._numeric_N = generator.normal(size=num_numeric) / max(1, num_numeric) ** 0.5
        self._keys = {
            feature: np.uint64(generator.integers(2**63)) for feature in smallest_tables(tables)
        }

    def logits(self, drawn: DrawnFeatures, numeric_BN: NDArray[np.floating]) -> NDArray[np.float64]:
        """The true logits of samples, float64 [B]."""
        lengths_FB = drawn.lengths_FB
        num_features, num_samples = lengths_FB.shape
        total_B = np.zeros(num_samples)
        parts = np.split(drawn.values_L, np.cumsum(lengths_FB.sum(axis=1))[:-1])
        for feature, lengths_B, ids in zip(drawn.feature_names, lengths_FB, parts, strict=True):
            bag_L = np.repeat(np.arange(num_samples), lengths_B)
            sums_B = np.bincount(bag_L, row_effects(ids, self._keys[feature]), num_samples)
            total_B += sums_B / np.maximum(lengths_B, 1)
        total_B /= num_features**0.5
        total_B += numeric_BN @ self._numeric_N
        return np.asarray(self.bias + self._signal * total_B / 2**0.5, dtype=np.float64)


def row_effects(ids_L: IntArray, key: np.uint64) -> NDArray[np.float64]:
    """A standard normal number for each row, always the same for one key.

    splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014) makes
    a uniform number of the id; the normal quantile makes it normal.
    """
    with np.errstate(over="ignore"):
        z = (ids_L.astype(np.uint64) + key) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    uniform = ((z >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return np.asarray(ndtri(uniform), dtype=np.float64)


class GeneratedSplit:
    """An endless sequence of samples, drawn block by block; see `ClickSplit`."""

    def __init__(
        self, tables: Sequence[Table], model: HiddenModel, samples: int, *, stream: int, seed: int
    ) -> None:
        """Describe the split; nothing is drawn yet."""
        self.num_samples: int | None = samples
        self._samples = samples
        self._tables = tuple(tables)
        self._model = model
        self._seed = [stream, seed]

    def read(
        self, share: Share, *, epoch: int = 0, first_step: int = 0, whole_steps: bool = True
    ) -> Iterator[ClickBatch]:
        """This rank's batches of one epoch; see `ClickSplit.read`."""
        blocks: dict[int, ClickBatch] = {}
        total = self._samples
        for step in range(first_step, num_steps(total, share, whole_steps=whole_steps)):
            part = share.slice_of_step(step)
            start, stop = (epoch * total + min(edge, total) for edge in (part.start, part.stop))
            wanted = range(start // _BLOCK_SIZE, -(-stop // _BLOCK_SIZE))
            blocks = {i: blocks.get(i) or self._draw(i)[0] for i in wanted}
            yield _joined(self._tables, blocks, start, stop)

    def best(self, num_samples: int) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """The hidden model's probabilities and the labels of the first samples, [B] each."""
        probabilities, labels = [], []
        for index in range(-(-num_samples // _BLOCK_SIZE)):
            batch, logits_B = self._draw(index)
            probabilities.append(expit(logits_B))
            labels.append(batch.labels_B)
        return np.concatenate(probabilities)[:num_samples], np.concatenate(labels)[:num_samples]

    def _draw(self, block: int) -> tuple[ClickBatch, NDArray[np.float64]]:
        generator = np.random.default_rng([*self._seed, block])
        drawn = draw_features(self._tables, _BLOCK_SIZE, generator)
        num_numeric = self._model.num_numeric
        numeric_BN = generator.normal(size=(_BLOCK_SIZE, num_numeric)).astype(np.float32)
        logits_B = self._model.logits(drawn, numeric_BN)
        batch = ClickBatch(
            feature_names=drawn.feature_names,
            lengths_FB=drawn.lengths_FB,
            values_L=drawn.values_L,
            weights_L=drawn.weights_L,
            labels_B=(generator.random(_BLOCK_SIZE) < expit(logits_B)).astype(np.float32),
            numeric_BN=numeric_BN if num_numeric else None,
        )
        return batch, logits_B


def _joined(
    tables: Sequence[Table], blocks: dict[int, ClickBatch], start: int, stop: int
) -> ClickBatch:
    """Samples [start, stop) of consecutive blocks."""
    cut = [
        _cut(block, max(start - i * _BLOCK_SIZE, 0), min(stop - i * _BLOCK_SIZE, _BLOCK_SIZE))
        for i, block in blocks.items()
    ]
    if len(cut) == 1:
        return cut[0]
    if not cut:
        names = tuple(smallest_tables(tables))
        return ClickBatch(
            feature_names=names,
            lengths_FB=np.zeros((len(names), 0), dtype=np.int64),
            values_L=np.zeros(0, dtype=np.int64),
            labels_B=np.zeros(0, dtype=np.float32),
        )
    first = cut[0]
    bags = [_per_feature(batch.lengths_FB, batch.values_L) for batch in cut]
    weights = [_per_feature(b.lengths_FB, b.weights_L) for b in cut if b.weights_L is not None]
    numeric = [batch.numeric_BN for batch in cut if batch.numeric_BN is not None]
    return ClickBatch(
        feature_names=first.feature_names,
        lengths_FB=np.concatenate([batch.lengths_FB for batch in cut], axis=1),
        values_L=np.concatenate(list(itertools.chain(*zip(*bags, strict=True)))),
        weights_L=np.concatenate(list(itertools.chain(*zip(*weights, strict=True))))
        if weights
        else None,
        labels_B=np.concatenate([batch.labels_B for batch in cut]),
        numeric_BN=np.concatenate(numeric) if numeric else None,
    )


def _cut(batch: ClickBatch, start: int, stop: int) -> ClickBatch:
    """Samples [start, stop) of a batch."""
    lengths_FB = batch.lengths_FB
    ends_FB = np.cumsum(lengths_FB.ravel()).reshape(lengths_FB.shape)
    first = ends_FB - lengths_FB
    spans = [
        slice(first[f, start], ends_FB[f, stop - 1]) if stop > start else slice(0, 0)
        for f in range(len(lengths_FB))
    ]
    weights = batch.weights_L
    return ClickBatch(
        feature_names=batch.feature_names,
        lengths_FB=lengths_FB[:, start:stop],
        values_L=np.concatenate([batch.values_L[span] for span in spans]),
        weights_L=None if weights is None else np.concatenate([weights[span] for span in spans]),
        labels_B=batch.labels_B[start:stop],
        numeric_BN=None if batch.numeric_BN is None else batch.numeric_BN[start:stop],
    )


def _per_feature(lengths_FB: IntArray, flat_L: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    return np.split(flat_L, np.cumsum(lengths_FB.sum(axis=1))[:-1])
