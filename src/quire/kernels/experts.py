"""Mixture of experts: the choice of each token's experts, and their products on the rows that chose them.

Next to read: `layers/experts.py`; `native/ops/experts.h` for the order of sums.
"""

from dataclasses import asdict, dataclass
from typing import Any

from quire._native import Activation
from quire.kernels.activations import OPERATORS
from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, Packing, Product, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol
from quire.lazy_torch import Tensor, functional, torch

CLAMPED, ALPHA, LIMIT = "clamped", 1.702, 7.0
TINY = 1e-20
"""Added to a sum of sigmoid scores, as DeepSeek-V3 does."""
ROW_MULTIPLE = 128
"""Columns of which rows of any type are whole cache lines, so that row i of several per token is at i · bytes."""


@dataclass(frozen=True, slots=True)
class ExpertScoring:
    """Scores of experts, and the groups of consecutive experts that a token may choose from.

    A token chooses from the `top_groups` of `num_groups` groups with the largest sums of their `group_best` largest
    values. Weights are multiplied by `factor`.
    """

    is_sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    factor: float = 1.0


SOFTMAX = ExpertScoring()


@kernel
def route(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    scoring: ExpertScoring = SOFTMAX,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Choose each token's `top_k` experts of largest logit, of equal ones the lower index.

    out[t, e] = factor · exp(l[t, e]) / Σ exp(l[t, i]) for chosen e, else 0; i is any expert, or with `renormalise` any
    chosen one.     (Shazeer 2017, eq. 3; Fedus 2021; groups: DeepSeek-V2, arXiv 2405.04434, sec. 2.2.2)

    With sigmoid scores s = 1 / (1 + exp(-l)), experts and groups are chosen by s + bias, and
    out[t, e] = factor · s[t, e], with `renormalise` over Σ s[t, i] of the chosen ones.     (DeepSeek-V3, arXiv
    2412.19437, eq. 12-16)

    With `scales`, out[t, e] is multiplied by scales[e].     (Gemma 4)

    Shapes: logits [T, X]; bias, scales [X] or None -> [T, X].
    Dtypes: bf16, fp16 or fp32, returned as the logits; computed in fp32.
    """
    values = logits.float()
    scores = torch.sigmoid(values) if scoring.is_sigmoid else torch.softmax(values, -1)
    ranked = values if not scoring.is_sigmoid else scores if bias is None else scores + bias.float()
    if scoring.top_groups < scoring.num_groups:
        grouped = ranked.view(len(values), scoring.num_groups, -1)  # [T, groups, experts of one]
        best = grouped.topk(scoring.group_best, -1).values.sum(-1)
        groups = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : scoring.top_groups]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, groups, value=True)
        ranked = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k]  # [T, k]
    weights = scores.gather(1, chosen)
    if renormalise and scoring.is_sigmoid:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    elif renormalise:
        weights = torch.softmax(values.gather(1, chosen), -1)
    weights = scoring.factor * weights if scales is None else scoring.factor * weights * scales.float()[chosen]
    return torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))


@kernel.with_traits(weight="gate_up")
def experts(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    name: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Sum the results of each token's experts, in ascending order of the experts.

    out[t] = Σ_e weights[t, e] · down_e(activation(gate_e(x[t])) · up_e(x[t])) over e with weights[t, e] ≠ 0

    Experts stand one below the other: of X of them, each has P / X rows of `gate_up`, first gates, then ups, and Q / X
    rows of `down`. The name "clamped" stands for g' / (1 + exp(-1.702 g')) · (u' + 1) instead, where g' = min(g, 7) and
    u' = max(-7, min(u, 7)).     (gpt-oss)

    Shapes: x [T, E]; weights [T, X]; gate_up [P, E]; down [Q, F]; gate_up_bias [P] or None; down_bias [Q] or None ->
    [T, E].
    Dtypes: all bf16, fp16 or fp32, returned the same; summed in fp32.
    """
    num_experts = weights.shape[1]
    gates_ups, downs = gate_up.view(num_experts, -1, gate_up.shape[1]), down.view(num_experts, -1, down.shape[1])
    out = torch.zeros(len(x), downs.shape[1], dtype=torch.float32, device=x.device)
    for expert in weights.any(0).nonzero().flatten().tolist():
        rows = weights[:, expert].nonzero().flatten()
        of_gates, of_downs = (
            None if bias is None else bias.view(num_experts, -1)[expert] for bias in (gate_up_bias, down_bias)
        )
        gates, ups = functional.linear(x[rows], gates_ups[expert], of_gates).chunk(2, -1)
        inner = _clamped(gates, ups) if name == CLAMPED else OPERATORS[name](gates) * ups
        results = functional.linear(inner, downs[expert], of_downs)
        out.index_add_(0, rows, results.float() * weights[rows, expert, None].float())
    return out.to(x.dtype)


def _clamped(gates: Tensor, ups: Tensor) -> Tensor:
    gates, ups = gates.clamp(max=LIMIT), ups.clamp(-LIMIT, LIMIT)
    return gates * torch.sigmoid(ALPHA * gates) * (ups + 1)


@dataclass(eq=False, frozen=True, slots=True)
class Route(Instruction):
    """The experts of each token, and all choices sorted by expert: pairs of a token and its weight, in `routed`."""

    logits: Columns
    choices: Buffer
    routed: Buffer
    num_experts: int
    top_k: int
    renormalise: bool
    scoring: ExpertScoring = SOFTMAX
    bias: Any = None
    scales: Any = None

    def emit(self, to: Emitter) -> None:
        to.push(
            "route",
            logits=self.logits,
            choices=self.choices,
            routed=to.address(self.routed),
            counts=to.counters(self, self.num_experts),
            num_experts=self.num_experts,
            top_k=self.top_k,
            renormalise=self.renormalise,
            bias=self.bias,
            scales=self.scales,
            **asdict(self.scoring),
        )

    def cost(self, step: StepShape) -> Cost:
        return Cost(10 * step.num_tokens * self.num_experts)


@dataclass(eq=False, frozen=True, slots=True)
class ExpertGemm(Instruction):
    """The products of each row with its expert's part of a weight. Subclasses say what becomes of the results."""

    weight: Any
    bias: Any
    packing: Packing
    route: Route
    x: Columns
    routed: Buffer
    out: Buffer

    @property
    def product(self) -> Product:
        return Product(self.weight, self.packing, self.route.num_experts, self.route.top_k)

    def cost(self, step: StepShape) -> Cost:
        """The expected cost: which experts are chosen is known when they are."""
        return self.product.cost(step, self.bias, self.product.num_read(step.num_tokens))

    def measured(self, step: StepShape, counters: Any) -> Cost:
        """The cost of the experts that the last step chose."""
        return self.product.cost(step, self.bias, int((counters(self.route) > 0).sum()))


@dataclass(eq=False, frozen=True, slots=True)
class ExpertUp(ExpertGemm):
    """Gates and ups of each row's experts, and the activated product of the two: k rows per token."""

    activation: Activation
    is_clamped: bool
    down: Any

    def emit(self, to: Emitter) -> None:
        to.push(
            "expert_up",
            weight=self.weight,
            bias=self.bias,
            x=self.x,
            down=self.down,
            out=_rows_of_choices(to, self.out, self.route),
            routed=to.address(self.routed),
            counts=to.counters(self.route, self.route.num_experts),
            num_experts=self.route.num_experts,
            activation=self.activation,
            alpha=ALPHA,
            limit=LIMIT if self.is_clamped else 0.0,
        )


@dataclass(eq=False, frozen=True, slots=True)
class ExpertDown(ExpertGemm):
    """The weighted sum of the products of each token's k rows, with `add` onto what is in `out`."""

    add: bool

    def emit(self, to: Emitter) -> None:
        to.push(
            "expert_down",
            weight=self.weight,
            bias=self.bias,
            x=_rows_of_choices(to, self.x.buffer, self.route),
            out=self.out,
            routed=to.address(self.routed),
            counts=to.counters(self.route, self.route.num_experts),
            num_experts=self.route.num_experts,
            add=self.add,
        )


def _rows_of_choices(to: Emitter, buffer: Buffer, route: Route) -> Any:
    """The `Rows` of a buffer that has k rows for each token, one after another."""
    return to.rows(buffer, buffer.row_bytes // route.top_k)


@lowers("route")
def _lower_route(to: Lowering, call: Call) -> None:
    """Only experts read the result, so that it is kept as a list and not as [T, X]."""
    logits, top_k, *rule = call.arguments
    if any(user.operation != "experts" or user.arguments[1].call is not call for user in to.users(call)):
        raise NotTraceableError("a use of routing weights by other operations than experts")
    choices, routed = Buffer(2 * top_k), Buffer(2 * top_k)
    to.notes[call] = Route(to.columns(logits), choices, routed, logits.sizes[0], top_k, *rule)
    to.append(to.notes[call])


@lowers("experts")
def _lower_experts(to: Lowering, call: Call) -> None:
    """Fused: the sum that alone reads the result."""
    x, weights, gate_up, down, name, gate_up_bias, down_bias = call.arguments
    if weights.call not in to.notes or not weights.is_whole:
        raise NotTraceableError("experts whose weights are not the result of route")
    routing: Route = to.notes[weights.call]
    up_packing, down_packing = to.packing_of(gate_up), to.packing_of(down)
    source = to.typed(x, up_packing.rows)
    inner = Buffer(routing.top_k * (-(-down.shape[1] // ROW_MULTIPLE) * ROW_MULTIPLE), down_packing.rows)
    up = (gate_up, gate_up_bias, up_packing, routing, source, routing.routed, inner)
    is_clamped = name == CLAMPED
    to.append(ExpertUp(*up, Activation.silu if is_clamped else Activation[name], is_clamped, down))
    users = to.users(call)
    sums = to.add_in_place(call, users[0], inner) if len(users) == 1 else None
    out = to.result(call) if sums is None else sums
    rows = Columns(inner, 0, inner.width)
    to.append(ExpertDown(down, down_bias, down_packing, routing, rows, routing.routed, out, add=sums is not None))


def _route_sizes(logits: Symbol, top_k: int, renormalise: bool, scoring: ExpertScoring, *_: Any) -> tuple[int, ...]:
    if len(logits.sizes) != 1 or not 1 <= top_k <= logits.sizes[0] or logits.sizes[0] % scoring.num_groups:
        raise NotTraceableError(f"a choice of {top_k} of {logits}")
    return logits.sizes


def _sizes(x: Symbol, weights: Symbol, gate_up: Any, down: Any, name: str, *_: Any) -> tuple[int, ...]:
    num_experts, num_inputs, inner = weights.sizes[0], x.sizes[-1], down.shape[1]
    expected = (num_experts * 2 * inner, num_inputs)
    if len(x.sizes) != 1 or tuple(gate_up.shape) != expected or down.shape[0] % num_experts:
        raise NotTraceableError(f"{num_experts} experts {list(gate_up.shape)}, {list(down.shape)} of {x}")
    return (down.shape[0] // num_experts,)


SIZES.update(route=_route_sizes, experts=_sizes)
