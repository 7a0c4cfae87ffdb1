"""A model on the devices, and the keys and values of the texts that it continues.

B rows, S tokens of a row, D model, V vocabulary, P slots (texts continued at once), T tokens of a
slot, K key heads, H head size, C tokens of a chunk.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale import sharding as shd
from jaxscale.config import Dtype, MeshConfig
from jaxscale.inference import fused
from jaxscale.inference.sampling import Sampling, draw
from jaxscale.inference.weights import Weights
from jaxscale.models import decoder
from jaxscale.ops import kept
from jaxscale.ops.documents import Documents, documents_of
from jaxscale.ops.execution import Execution
from jaxscale.ops.kept import Kept
from jaxscale.ops.layers import LAYERS, Unstacked, layer_of
from jaxscale.step import layout

# Tokens made between two looks at them: each look waits for the device, and a program holds a loop.
CHUNK = 16
# Rows of prompts and slots are as long as a multiple of this: few lengths to compile.
MULTIPLE = 128
# Places are counted in int32.
MOST_TOKENS = 2**30
# That a row of texts to judge may hold.
MOST_DOCUMENTS = 32


class Texts(NamedTuple):
    """The newest token of each text, int32 [P], its place there, and the layers' keys, values.

    caches: a pair of arrays [P, K, T, H] for each layer.
    """

    tokens_P: Any
    places_P: Any
    caches: Any


class Engine:
    """A model whose heads and features are split over devices (tensor parallelism)."""

    def __init__(self, weights: Weights, *, dtype: Dtype = Dtype.BFLOAT16, devices=None):
        """Reads the weights. devices: all there are unless given; as many as divide the model."""
        devices = jax.devices() if devices is None else devices
        self.model = weights.model
        num_devices = _most_devices(self.model, len(devices))
        config = MeshConfig(fsdp=1, tensor=num_devices, sequence_parallel=False)
        sizes = config.sizes(num_devices)
        self.mesh = shd.make_mesh(sizes, devices=devices[:num_devices], axis_types="auto")
        rules = layout.rules_of(config, model_rules=self.model.rules(sizes))
        self.rules = rules.replace(batch=None, embed=None)  # `tensor` alone splits
        self.execution = Execution(
            dtype=dtype,
            platform=devices[0].platform,
            compute_capability=getattr(devices[0], "compute_capability", "9.0"),
        )
        self._num_cores = getattr(devices[0], "core_count", 0)
        # Why one text's layers are XLA's programs and not one launch each, if they are.
        self.unfused = fused.objection(
            self.model,
            execution=self.execution,
            num_devices=num_devices,
            num_cores=self._num_cores,
        )
        model = jax.eval_shape(lambda: self.model.build(nnx.Rngs(0)))
        self.graphdef, abstract = nnx.split(model, nnx.Param)
        self.params = self._read(weights, abstract)

    def _read(self, weights: Weights, abstract: nnx.State) -> nnx.State:
        """The parameters, in the dtypes in which products read them; stacks are `Unstacked`."""
        boxes = {".".join(map(str, path)): box for path, box in nnx.to_flat_state(abstract)}
        wanted = {path: self._wanted(box) for path, box in boxes.items()}
        values = weights.read(wanted)
        filled = []
        for path, box in boxes.items():
            value = values.pop(path)
            keys = tuple(path.split("."))
            if (shd.axes_of(box) or ("",))[0] == LAYERS:
                is_turned = self.unfused is None and keys[-1] in fused.TURNED
                box = box.replace(_unstacked(value, is_turned=is_turned))
            else:
                box = box.replace(value)
            filled.append((keys, box))
        return nnx.from_flat_state(filled)

    def _wanted(self, box) -> jax.ShapeDtypeStruct:
        leaf, axes = box.get_value(), shd.axes_of(box) or ()
        # Products read matrices in the dtype of the run; norms are float32 as in training.
        dtype = jnp.dtype(self.execution.dtype) if "embed" in axes else leaf.dtype
        sharding = jax.sharding.NamedSharding(self.mesh, self.rules.spec(axes, leaf.shape))
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    def continued(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[list[np.ndarray]]:
        """Yields, again and again, the next tokens of each prompt: int32 [0 to CHUNK].

        At most max_tokens in all; a token of stop_ids ends a text and is not yielded. Raises
        ValueError for a prompt without tokens, or with one that the model has not.
        """
        self._check(prompts, max_tokens=max_tokens)
        sampling.validate()
        left = np.full(len(prompts), max_tokens)
        key = jax.random.key(sampling.seed)
        with shd.use(self.mesh, self.rules):
            first_P, texts = self._begin(prompts, max_tokens=max_tokens, sampling=sampling, key=key)
            made_PC = first_P[:, None]
            for number in itertools.count(1):
                following, num_made = None, made_PC.shape[1]
                if (left > num_made).any():
                    # Begun before this chunk is looked at, so that the device does not wait for
                    # the host: 0.1 ms a token of 1.5 B. Of no use if all texts end in this one.
                    following, texts = self._continue(
                        self.params, texts, key=jax.random.fold_in(key, number), sampling=sampling
                    )
                rows = np.asarray(made_PC)
                chunk = [_until(row[:n], stop_ids) for row, n in zip(rows, left, strict=True)]
                has_ended = [len(row) < num_made for row in chunk]
                left = np.where(has_ended, 0, left - num_made)
                yield chunk
                if following is None or not left.any():
                    return
                made_PC = following

    def _check(self, prompts: Sequence[np.ndarray], *, max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: set it to 1 or more")
        if max_tokens > MOST_TOKENS:
            raise ValueError(f"max_tokens={max_tokens}: set it to {MOST_TOKENS} or less")
        for number, prompt in enumerate(prompts, 1):
            if not len(prompt):
                raise ValueError(f"prompt {number} holds no token; write something")
            if not (0 <= min(prompt) and max(prompt) < self.model.vocab_size):
                raise ValueError(
                    f"prompt {number} holds token {max(prompt)}; the model has "
                    f"{self.model.vocab_size}: it was trained with another tokenizer"
                )
            limit = self.model.max_seq_len
            if limit is not None and len(prompt) + max_tokens > limit:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens, and with max_tokens={max_tokens} "
                    f"more it is longer than the {limit} that the model is meant for"
                )

    def _begin(self, prompts, *, max_tokens: int, sampling: Sampling, key):
        """(the first token of each, the texts), from all prompts in one packed row."""
        lengths = np.array([len(prompt) for prompt in prompts])
        num_tokens = _rounded(int(lengths.max()) + max_tokens)
        row_length = _rounded(int(lengths.sum()))
        slots = np.full((1, row_length), -1, np.int32)
        slots[0, : lengths.sum()] = np.repeat(np.arange(len(prompts)), lengths)
        tokens, places = np.zeros((2, 1, row_length), np.int32)
        tokens[0, : lengths.sum()] = np.concatenate(prompts)
        places[0, : lengths.sum()] = np.concatenate([np.arange(n) for n in lengths])
        return self._read_prompts(
            self.params,
            (tokens, slots, places, (lengths.cumsum() - 1).astype(np.int32)),
            key=key,
            num_tokens=num_tokens,
            sampling=sampling,
        )

    def losses(
        self, tokens: np.ndarray, *, segments: np.ndarray, places: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """-log p of each token's target, float32 [S], and whether the target is the likeliest.

        All int32 [S]: a packed row as in training, S a multiple of MULTIPLE, of at most
        MOST_DOCUMENTS; where there is no target, any token.
        """
        row = tuple(x[None].astype(np.int32) for x in (tokens, segments, places, targets))
        with shd.use(self.mesh, self.rules):
            loss_S, is_likeliest_S = self._losses(self.params, row)
        return np.asarray(loss_S), np.asarray(is_likeliest_S)

    @functools.cached_property
    def _losses(self):
        return jax.jit(self._losses_of)

    @functools.cached_property
    def _read_prompts(self):
        return jax.jit(self._read_prompts_of, static_argnames=("num_tokens", "sampling"))

    @functools.cached_property
    def _continue(self):
        return jax.jit(self._continue_of, static_argnames="sampling", donate_argnums=1)

    # What is compiled.

    def _read_prompts_of(self, params, row, *, key, num_tokens: int, sampling: Sampling):
        tokens_1S, slots_1S, places_1S, last_P = row
        num_slots, model = last_P.shape[0], nnx.merge(self.graphdef, params)
        segments_1S = slots_1S + 1
        documents = documents_of(segments_1S, places_1S, max_documents=num_slots)
        empty = functools.partial(
            kept.empty,
            num_slots,
            num_tokens,
            num_kv_heads=self.model.num_kv_heads,
            head_size=self.model.head_dim(),
            dtype=jnp.dtype(self.execution.dtype),
        )
        caches = [(empty(), empty()) for _ in range(self.model.num_layers)]
        run = Kept(slots_1S, places_1S, documents)
        x_1SD, caches = self._run_kept(model, tokens_1S, run, caches=caches)
        first_P = draw(self._logits(model, x_1SD[0, last_P]), sampling, key=key)
        return first_P, Texts(first_P, places_1S[0, last_P] + 1, caches)

    def _continue_of(self, params, texts: Texts, *, key, sampling: Sampling):
        """(tokens [P, CHUNK], the texts with them)."""
        model = nnx.merge(self.graphdef, params)
        slots_P1 = jnp.arange(texts.tokens_P.shape[0], dtype=jnp.int32)[:, None]

        def extend(i, carry):
            texts, made_PC = carry
            run = Kept(slots_P1, texts.places_P[:, None], None)
            x_P1D, caches = self._run_kept(model, texts.tokens_P[:, None], run, caches=texts.caches)
            logits_PV = self._logits(model, x_P1D[:, 0])
            next_P = draw(logits_PV, sampling, key=jax.random.fold_in(key, i))
            return Texts(next_P, texts.places_P + 1, caches), made_PC.at[:, i].set(next_P)

        made_PC = jnp.zeros((texts.tokens_P.shape[0], CHUNK), jnp.int32)
        texts, made_PC = jax.lax.fori_loop(0, CHUNK, extend, (texts, made_PC))
        return made_PC, texts

    def _run_kept(self, model, tokens_BS, run: Kept, *, caches):
        """(the last hidden states, the layers' keys and values with those of these tokens)."""
        is_next = run.fresh is None and tokens_BS.shape == (1, 1)
        one_launch = fused.Layers(self._num_cores) if is_next and self.unfused is None else None
        new = []
        x_BSD, caches = model.embed(tokens_BS, self.execution), iter(caches)
        for block, weights, shared in _layers(model, run):
            run.keys, run.values = next(caches)
            block = one_launch.block if one_launch else block
            x_BSD, _ = block(x_BSD, weights, shared, self.execution)
            new.append((run.keys, run.values))
        return x_BSD, new

    def _losses_of(self, params, row):
        tokens_1S, segments_1S, places_1S, targets_1S = row
        model = nnx.merge(self.graphdef, params)
        documents = documents_of(segments_1S, places_1S, max_documents=MOST_DOCUMENTS)
        x_1SD = model.embed(tokens_1S, self.execution)
        for block, weights, shared in _layers(model, documents):
            x_1SD, _ = block(x_1SD, weights, shared, self.execution)

        def of_chunk(chunk):
            x_CD, targets_C = chunk
            logits_CV = self._logits(model, x_CD)
            of_target_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0]
            loss_C = jax.nn.logsumexp(logits_CV, axis=-1) - of_target_C
            return loss_C, jnp.argmax(logits_CV, axis=-1) == targets_C

        chunks = (x_1SD.reshape(-1, MULTIPLE, x_1SD.shape[-1]), targets_1S.reshape(-1, MULTIPLE))
        return jax.tree.map(jnp.ravel, jax.lax.map(of_chunk, chunks))

    def _logits(self, model, x_PD):
        """float32 [P, V], of all devices alike."""
        x_P1D, head_DV, cap = model.output(x_PD[:, None])
        return decoder.logits(x_P1D[:, 0], head_DV, cap=cap, vocab_size=self.model.vocab_size)


def _layers(model, documents: Documents | Kept):
    """(block, weights, what its stack shares) of each layer, in order."""
    for stack in model.stacks():
        shared = stack.share(documents)
        for number in range(stack.num_layers):
            block = stack.blocks[number % len(stack.blocks)]
            yield block, layer_of(stack.weights, number), shared


def _unstacked(stacked, *, is_turned: bool) -> Unstacked:
    def cut(stacked):
        return tuple(fused.inputs_last(layer) if is_turned else layer for layer in stacked)

    layers = jax.jit(cut)(stacked)
    stacked.delete()
    return Unstacked(layers, is_turned)


def _until(row: np.ndarray, stop_ids: Sequence[int]) -> np.ndarray:
    """The tokens before the first that stops."""
    stops = np.isin(row, stop_ids)
    return row[: stops.argmax()] if stops.any() else row


def _rounded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def _most_devices(model: decoder.Config, available: int) -> int:
    """As many of the devices as split the model evenly, key heads included."""
    sizes = dict.fromkeys(shd.MESH_AXES, 1)
    for num in range(available, 1, -1):
        try:
            model.validate_on(sizes | {"tensor": num})
        except ValueError:
            continue
        if model.num_kv_heads % num == 0:
            return num
    return 1
