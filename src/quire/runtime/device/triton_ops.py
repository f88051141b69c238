"""`TritonOps`: a plan's ops by Triton kernels, in the places of the references of `ops.py`.

Each function has the fields of its reference, and calls it for forms that its kernel lacks. Products of several rows
are cuBLAS's. Nothing is allocated while a step runs: scratch memory is static.
Next to read: `kernels/triton/attention.py`, then `fuse.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire._native import Activation
from quire.kernels.triton import attention, inputs, layers, recurrence
from quire.runtime.device.fuse import fuse_row
from quire.runtime.device.memory import StepMemory
from quire.runtime.device.ops import OPS, KvView
from quire.runtime.device.plan import DeviceCall, Functions
from quire.runtime.device.tiles import FEW_ROWS, MAX_SPLITS, Tiles, power_of_two, tiles_of

MAX_NORM_WIDTH = 16384
CHUNK = 1024
"""Values per program of an elementwise function."""
MAX_QUERIES = 4
"""Most new tokens of a request that its splits of keys share, where requests have drafts."""


@dataclass(frozen=True, slots=True)
class WorkLists:
    """Items of attention layers of one window and number of query tokens in a tile: see `plan_items`. Dtypes: int32."""

    item_request: torch.Tensor
    item_index: torch.Tensor
    first_part: torch.Tensor
    num_splits: torch.Tensor
    tile_request: torch.Tensor
    tile_query: torch.Tensor
    num_tiles: torch.Tensor


class TritonOps:
    """Functions by op, and their scratch memory.

    Attributes:
        functions: by the op's name. num_launches: kernels launched so far, those of a captured step once.
    """

    def __init__(self, step: StepMemory, *, has_drafts: bool, tiles: Tiles | None = None) -> None:
        """`tiles`: None: those of the card. Mutates: step, which then tells decodes from prompts."""
        self.step, self.num_launches = step, 0
        capability, num_multiprocessors = 80, 1
        if step.device.type == "cuda":
            card = torch.cuda.get_device_properties(step.device)
            capability, num_multiprocessors = 10 * card.major + card.minor, card.multi_processor_count
        self.tiles = tiles or tiles_of(capability)
        self._programs = self.tiles.programs_per_multiprocessor * num_multiprocessors
        step.max_queries = MAX_QUERIES if has_drafts else 1
        self._lists: dict[tuple[int, int], WorkLists] = {}
        self._part = self._sums = self._products = torch.zeros(0, device=step.device)
        names = "embed activate add multiply scale soft_cap gate_rows norm gemm rotary write_kv attend"
        of_states = {"causal_conv": recurrence.causal_conv, "recurrence": recurrence.recurrence}
        self.functions: Functions = {name: getattr(self, name) for name in names.split()} | of_states

    def prepare(self, calls: Sequence[DeviceCall]) -> None:
        """Allocate the scratch memory of these calls."""
        num_rows = max(len(self.step.given), len(self.step.logit_rows))
        part, heads, products = 0, 0, 0
        for call in calls:
            values = call.values
            if call.name == "attend":
                part, heads = max(part, values["out"].whole.shape[1]), max(heads, values["num_heads"])
                kv_heads, size = values["kv"].values.shape[3:]
                self._make_lists(values["window"], values["num_heads"] // kv_heads, size, values["kv"].values.itemsize)
            if call.name == "gemm" and _needs_scratch(**{**values, "out": values["out"].whole}):
                products = max(products, values["weight"].shape[0])
        num_parts = self.step.max_requests * self.step.max_queries * MAX_SPLITS
        sizes = num_parts * part, num_parts * heads * 2, num_rows * products
        self._part, self._sums, self._products = (torch.zeros(size, device=self.step.device) for size in sizes)

    def fuse(self, calls: Sequence[DeviceCall]) -> list[DeviceCall]:
        """Return the calls of a step of one row."""
        return fuse_row(calls, self.linear_row)

    def _make_lists(self, window: int, group_size: int, head_size: int, item_bytes: int) -> None:
        tile_queries = self.tiles.of_prompts(head_size, item_bytes, group_size).rows // group_size
        step, most = self.step, self.step.max_requests
        sizes = [most * MAX_SPLITS] * 2 + [most, most + 1] + [len(step.given) + most] * 2 + [1]
        made = (torch.zeros(size, dtype=torch.int32, device=step.device) for size in sizes)
        self._lists.setdefault((window, tile_queries), WorkLists(*made))

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *tensors: torch.Tensor,
        num_warps: int = 4,
        stages: int = 1,
        **constants: Any,
    ) -> None:
        self.num_launches += 1
        if constants.get("PDL"):
            constants["launch_pdl"] = True
        kernel[grid](*tensors, num_warps=num_warps, num_stages=stages, enable_fp_fusion=True, **constants)

    # --- The start of a step --------------------------------------------------------------------

    def gather(self, num_rows: int) -> None:
        """Make what `StepMemory.gather` makes, and the work lists of attention."""
        step, chunk = self.step, 16
        self._launch(
            inputs.gather_inputs,
            (-(-num_rows // chunk),),
            *(step.starts, step.counts, step.first_rows, step.rows, step.given, step.tables, step.last_tokens),
            *(step.token_ids, step.positions, step.request_of, step.slots, step.num_tokens),
            R=step.max_requests,
            R_PAD=power_of_two(step.max_requests),
            T=len(step.given),
            CHUNK=chunk,
            GROUPS=len(step.tables),
            GROUP_STRIDE=step.tables.stride(0),
            TABLE_STRIDE=step.tables.stride(1),
            SLOTS_STRIDE=step.slots.stride(0),
            BLOCK=step.block_size,
        )
        if num_rows > 1:
            for (window, tile_queries), lists in self._lists.items():
                self._launch(
                    attention.plan_items,
                    (min(num_rows, step.max_requests),),
                    *(
                        step.starts,
                        step.counts,
                        lists.item_request,
                        lists.item_index,
                        lists.first_part,
                        lists.num_splits,
                    ),
                    *(lists.tile_request, lists.tile_query, lists.num_tiles),
                    R=step.max_requests,
                    R_PAD=power_of_two(step.max_requests),
                    WINDOW=window,
                    MAX_QUERIES=step.max_queries,
                    TILE_QUERIES=tile_queries,
                    CHUNK=128,
                    **self._splits(num_rows),
                )

    def _splits(self, num_rows: int) -> dict[str, int]:
        """Constants of how the keys of decodes are split, which depend on a request's length alone."""
        split = self.tiles.split_few if num_rows <= FEW_ROWS else self.tiles.split
        split = self.tiles.split_alone if num_rows == 1 else split
        most = split * (MAX_SPLITS - 1)
        return {"SPLIT": split, "MAX_SPLITS": MAX_SPLITS, "DOUBLINGS": (-(-self.step.longest // most) - 1).bit_length()}

    def rotary(
        self,
        step: StepMemory,
        frequencies: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        half: int,
        scales: torch.Tensor | None = None,
        num_scales: int = 0,
        scale_period: int = 1,
    ) -> None:
        """See `ops.rotary`."""
        self._launch(
            inputs.rotary,
            (len(cos),),
            *(step.positions, frequencies, frequencies if scales is None else scales, cos, sin),
            HALF=cos.shape[1],
            HALF_PAD=power_of_two(cos.shape[1]),
            STRIDE=cos.stride(0),
            HAS_SCALES=scales is not None,
            NUM_SCALES=num_scales,
            PERIOD=scale_period,
            num_warps=1,
        )

    # --- Rows -----------------------------------------------------------------------------------

    def _map(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        other: torch.Tensor | None = None,
        *,
        function: str = "none",
        number: float = 1.0,
        activation: Activation = Activation.none,
        ids: torch.Tensor | None = None,
        offset: int = 0,
        has_bias: bool = False,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        width = out.shape[1]
        is_rows = other is not None and other.ndim == 2
        self._launch(
            layers.map_rows,
            (len(out), -(-width // CHUNK)),
            *(x, x if other is None else other, out, x if ids is None else ids),
            WIDTH=width,
            X_STRIDE=x.stride(0),
            OTHER_STRIDE=other.stride(0) if is_rows else 0,  # type: ignore[union-attr]
            OTHER_STEP=int(is_rows and other.shape[1] > 1),  # type: ignore[union-attr]
            OUT_STRIDE=out.stride(0),
            FUNCTION=function,
            NUMBER=float(number),
            ACTIVATION=activation.name,
            HAS_IDS=ids is not None,
            OFFSET=offset,
            HAS_BIAS=has_bias,
            GATED=gated,
            ADD=add,
            CHUNK=min(CHUNK, power_of_two(width)),
        )

    def embed(self, step: StepMemory, table: torch.Tensor, out: torch.Tensor, offset: int, of_positions: bool) -> None:
        """See `ops.embed`."""
        self._map(table, out, ids=step.positions if of_positions else step.token_ids, offset=offset)

    def activate(
        self,
        step: StepMemory,
        x: torch.Tensor,
        out: torch.Tensor,
        width: int,
        from_logit_rows: bool = False,
        activation: Activation = Activation.none,
        gated: bool = False,
    ) -> None:
        """See `ops.activate`."""
        self._map(x, out, ids=step.logit_rows if from_logit_rows else None, activation=activation, gated=gated)

    def add(self, step: StepMemory, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, width: int) -> None:
        """See `ops.add`."""
        self._map(a, out, b, function="add")

    def multiply(self, step: StepMemory, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, width: int) -> None:
        """See `ops.multiply`."""
        self._map(a, out, b, function="multiply")

    def scale(
        self, step: StepMemory, x: torch.Tensor, out: torch.Tensor, factor: float, by: torch.Tensor | None, width: int
    ) -> None:
        """See `ops.scale`."""
        if by is None:
            self._map(x, out, function="factor", number=factor)
        else:
            self._map(x, out, by.view(-1), function="scale")

    def soft_cap(self, step: StepMemory, x: torch.Tensor, out: torch.Tensor, cap: float, width: int) -> None:
        """See `ops.soft_cap`."""
        self._map(x, out, function="cap", number=cap)

    def gate_rows(
        self, step: StepMemory, x: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, per_value: bool, width: int
    ) -> None:
        """See `ops.gate_rows`."""
        self._map(x, out, gates, function="sigmoid")

    def norm(self, step: StepMemory, **values: Any) -> None:
        """See `ops.norm`."""
        x, out, weight, bias = values["x"], values["out"], values["weight"], values["bias"]
        width, groups = values["width"], values["groups"]
        if values["gates"] is not None or width > MAX_NORM_WIDTH:
            OPS["norm"](step, **values)
            return
        self._launch(
            layers.norm_rows,
            (len(x), groups),
            *(x, x if weight is None else weight, x if bias is None else bias, out),
            WIDTH=width,
            PADDED=power_of_two(width),
            X_STRIDE=x.stride(0),
            OUT_STRIDE=out.stride(0),
            WEIGHT_STRIDE=width if values["weight_per_group"] else 0,
            EPSILON=values["epsilon"],
            SUBTRACT_MEAN=values["subtract_mean"],
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            ADD=values["add"],
            num_warps=4 if width <= 2048 else 8,
        )

    # --- Products -------------------------------------------------------------------------------

    def gemm(
        self,
        step: StepMemory,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        out: torch.Tensor,
        activation: Activation,
        gated: bool,
        add: bool,
        ahead: None,
        lora: None,
    ) -> None:
        """See `ops.gemm`."""
        if x.dtype != weight.dtype or (x.device.type == "cpu" and out.dtype != x.dtype):
            OPS["gemm"](step, weight, bias, x, out, activation, gated, add, ahead, lora)
            return
        if bias is None and not gated and activation == Activation.none:
            self._multiply(x, weight, out, add)
            return
        result = out
        if _needs_scratch(out, bias, activation, gated, add):
            result = self._products[: len(x) * len(weight)].view(len(x), len(weight))
        self._multiply(x, weight, result, False)
        has_bias = bias is not None
        self._map(result, out, bias, has_bias=has_bias, activation=activation, gated=gated, add=add)

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """out = x · weightᵀ, or out += that. cuBLAS sums in fp32."""
        self.num_launches += 1
        other: dict[str, Any] = {} if out.dtype == x.dtype else {"out_dtype": out.dtype}
        if add:
            torch.addmm(out, x, weight.t(), **other, out=out)
        else:
            torch.mm(x, weight.t(), **other, out=out)

    def linear_row(
        self,
        step: StepMemory,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        x: torch.Tensor,
        out: torch.Tensor,
        epsilon: float,
        activation: Activation,
        gated: bool,
        add: bool,
    ) -> None:
        """out = act(norm(x) · weightᵀ + bias) of one row, gated or added: one launch."""
        num_outputs, num_inputs = out.shape[1], weight.shape[1]
        outputs = self.tiles.row_outputs
        self._launch(
            layers.linear_row,
            (-(-num_outputs // outputs),),
            *(x, weight, x if norm is None else norm, x if bias is None else bias, out),
            N=num_outputs,
            IN=num_inputs,
            OUTPUTS=outputs,
            INPUTS=min(self.tiles.row_inputs, power_of_two(num_inputs)),
            EPSILON=epsilon,
            ACTIVATION=activation.name,
            NORMED=norm is not None,
            HAS_BIAS=bias is not None,
            GATED=gated,
            ADD=add,
            PDL=self.tiles.pdl,
            num_warps=self.tiles.row_warps,
        )

    # --- Attention ------------------------------------------------------------------------------

    def write_kv(self, step: StepMemory, **values: Any) -> None:
        """See `ops.write_kv`."""
        q, k, v, kv = values["q"], values["k"], values["v"], values["kv"]
        cos, sin, q_norm, k_norm = values["cos"], values["sin"], values["q_norm"], values["k_norm"]
        if cos is None and values["q_cos"] is not None:
            OPS["write_kv"](step, **values)
            return
        num_heads, (block, num_kv_heads, size), strides = values["num_heads"], kv.values.shape[2:], kv.values.stride()
        own = (cos, sin) if values["q_cos"] is None else (values["q_cos"], values["q_sin"])
        heads_at_once = self.tiles.write_heads if size <= 128 else max(self.tiles.write_heads // 2, 1)
        self._launch(
            layers.write_kv,
            (len(q), -(-(num_heads + 2 * num_kv_heads) // heads_at_once)),
            *(q, k, v),
            *(q if given is None else given for given in (q_norm, k_norm, cos, sin, *own)),
            *(step.slots[kv.group], kv.values),
            H=num_heads,
            K=num_kv_heads,
            D=size,
            D_PAD=power_of_two(size),
            HALF=0 if cos is None else cos.shape[1],
            HEADS=heads_at_once,
            Q_STRIDE=q.stride(0),
            K_STRIDE=k.stride(0),
            V_STRIDE=v.stride(0),
            ROTATION_STRIDE=0 if cos is None else cos.stride(0),
            BLOCK=block,
            BLOCK_STRIDE=strides[0],
            PLANE_STRIDE=strides[1],
            TOKEN_STRIDE=strides[2],
            HEAD_STRIDE=strides[3],
            EPSILON=values["epsilon"],
            HAS_Q_NORM=q_norm is not None,
            HAS_K_NORM=k_norm is not None,
            HAS_ROTATION=cos is not None,
            PDL=self.tiles.pdl and len(q) == 1,
            num_warps=self.tiles.write_warps,
        )

    def attend(
        self,
        step: StepMemory,
        q: torch.Tensor,
        stride: int,
        out: torch.Tensor,
        num_heads: int,
        window: int,
        scale: float,
        kv: KvView,
        soft_cap: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """See `ops.attend`."""
        num_rows, (block, num_kv_heads, size), strides = len(q), kv.values.shape[2:], kv.values.stride()
        group_size, item_bytes, pdl = num_heads // num_kv_heads, kv.values.itemsize, self.tiles.pdl and len(q) == 1
        prompt = self.tiles.of_prompts(size, item_bytes, group_size)
        lists, table = self._lists[window, prompt.rows // group_size], step.tables[kv.group]
        splits = {**self._splits(num_rows), "ALONE": num_rows == 1}
        of_model = {
            "H": num_heads,
            "D": size,
            "D_PAD": power_of_two(size),
            "OUT_STRIDE": out.stride(0),
            "WINDOW": window,
            "HAS_SINKS": sinks is not None,
            "PDL": pdl,
        }
        of_sinks = self._sums if sinks is None else sinks

        def launch(item_request: Any, item_at: Any, num_items: Any, tile: Any, programs: int, **of_items: int) -> None:
            self._launch(
                attention.attend,
                (min(self._programs, programs), num_kv_heads),
                *(q, out, self._part, self._sums, kv.values, table, step.rows, step.starts, step.counts),
                *(step.first_rows, item_request, item_at, num_items, lists.first_part, of_sinks),
                SCALE=float(scale),
                SOFT_CAP=float(soft_cap),
                K=num_kv_heads,
                Q_STRIDE=q.stride(0),
                TABLE_STRIDE=table.stride(0),
                BLOCK=block,
                BLOCK_STRIDE=strides[0],
                PLANE_STRIDE=strides[1],
                TOKEN_STRIDE=strides[2],
                HEAD_STRIDE=strides[3],
                ROWS=tile.rows,
                TILE=tile.keys,
                MAX_QUERIES=step.max_queries,
                num_warps=tile.num_warps,
                stages=tile.num_stages,
                **of_model,
                **of_items,
            )

        if step.has_prompts:
            none = {"SPLIT": 0, "MAX_SPLITS": 1, "DOUBLINGS": 0, "ALONE": False}
            launch(lists.tile_request, lists.tile_query, lists.num_tiles, prompt, num_rows, **none)
        if step.has_decodes:
            tile = self.tiles.of_decodes(size, item_bytes, step.max_queries * group_size)
            total = lists.num_splits[step.max_requests :]
            launch(lists.item_request, lists.item_index, total, tile, num_rows * MAX_SPLITS, **splits)
            heads = 1 if num_rows == 1 else min(4, power_of_two(num_heads))
            self._launch(
                attention.merge_splits,
                (min(num_rows, step.max_requests), -(-num_heads // heads)),
                *(out, self._part, self._sums, step.starts, step.counts, step.first_rows),
                *(lists.first_part, lists.num_splits, of_sinks),
                HEADS=heads,
                WAYS=MAX_SPLITS if num_rows == 1 else 4,
                **of_model,
                **splits,
            )


def _needs_scratch(
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    gated: bool,
    add: bool,
    **_: Any,
) -> bool:
    """Return whether a product cannot be computed in the place of its result, and changed there."""
    changed = bias is not None or activation != Activation.none
    return gated or (changed and (add or out.dtype != torch.float32))
