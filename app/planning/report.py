"""A plan as text."""

from collections.abc import Sequence

from app.planning.prediction import BATCHES, StepFloor
from app.planning.serve_plan import ServePlan


def format_plan(plan: ServePlan) -> str:
    sections = [_header(plan), _weights(plan), _memory(plan), _floors(plan)]
    if plan.predictions:
        sections.append(_predictions(plan))
    return "\n\n".join([*sections, *_notes(plan)])


def _header(plan: ServePlan) -> str:
    device, drafter = plan.device, plan.drafter
    model = f"{plan.model}, {count(plan.target.share.num_parameters)} parameters"
    if drafter is not None and drafter.share is not None:
        model += f" + {drafter.name} {count(drafter.share.num_parameters * drafter.num_networks)}"
    ranks = "1 rank" if plan.num_ranks == 1 else f"{plan.num_ranks} ranks"
    if plan.target.layout.expert_parallel:
        ranks += ", each with its own experts,"
    rates = f"{device.bandwidth / 1e12:.3g} TB/s, {device.flops / 1e12:.3g} TFLOP/s"
    drafts = f", k = {plan.num_drafts}" if plan.num_drafts else ""
    if drafter is not None and drafter.has_actor:
        drafts += ", by a draft actor beside rank 0"
    return f"{model}\n{ranks} of {device.name}: {size(device.memory_bytes)}, {rates}\nmethod {plan.method}{drafts}"


def _weights(plan: ServePlan) -> str:
    rows = [[name, size(part.num_bytes)] for name, part in plan.target.share.parts.items()]
    if plan.drafter is not None and plan.drafter.share is not None:
        rows.append([plan.drafter.name, size(plan.drafter.weight_bytes)])
    rows.append(["all", size(plan.capacity.weight_bytes)])
    return table(["weights", "a rank"], rows)


def _memory(plan: ServePlan) -> str:
    capacity = plan.capacity
    rows = [
        ["weights", size(capacity.weight_bytes)],
        ["runtime", size(capacity.runtime_bytes)],
        ["a step's tensors", size(capacity.activation_bytes)],
        ["KV pool", size(capacity.pool_bytes)],
        ["left", size(capacity.spare_bytes)],
        ["all", size(capacity.device_bytes)],
    ]
    longest = min(capacity.room_tokens, plan.target.shape.config.max_position_embeddings)
    contexts = capacity.pool_tokens / plan.max_model_len
    return "\n".join(
        [
            table(["memory", "a rank"], rows),
            "",
            f"KV: {capacity.token_bytes} bytes a token; the pool holds {capacity.pool_tokens} tokens, {contexts:.1f} "
            f"contexts of {plan.max_model_len}; there is room for {capacity.room_tokens}.",
            f"Longest request: {plan.max_model_len} tokens as configured, {longest} at most.",
        ]
    )


def _floors(plan: ServePlan) -> str:
    rows = []
    for plain, drafted in plan.floors:
        rows.append([str(plain.num_sequences), "plain", *_floor_cells(plain), ""])
        if drafted is not None:
            needed = f"{drafted.seconds / plain.seconds:.2f}"
            rows.append(["", f"k = {drafted.num_drafts}", *_floor_cells(drafted), needed])
    headers = ["sequences", "drafts", "rows", "experts", "weights read", "KV read", "target", "drafter", "step"]
    return "\n".join(
        [
            table([*headers, "pays from"], rows, left=(1,)),
            "",
            f"The least a step can take, at {plan.context_len} tokens of context: what it reads or, *, computes.",
            "experts: distinct ones that rows touch in a layer. pays from: tokens a sequence and step.",
            *([f"{1e6 * plan.device.layer_overhead_s:g} µs a layer added."] if plan.device.layer_overhead_s else []),
        ]
    )


def _floor_cells(floor: StepFloor) -> list[str]:
    cost = floor.target
    return [
        str(floor.num_rows),
        "–" if floor.experts_touched is None else f"{floor.experts_touched:.1f}",
        size(cost.weight_bytes),
        size(cost.kv_bytes),
        duration(cost.seconds) + ("*" if cost.arithmetic_s > cost.memory_s else ""),
        duration(floor.draft_s) if floor.draft_s else "–",
        duration(floor.seconds),
    ]


def _predictions(plan: ServePlan) -> str:
    rows = []
    best = [max(prediction.speedups[i] for prediction in plan.predictions) for i in range(len(BATCHES))]
    for prediction in plan.predictions:
        cells = [
            f"{speedup:.2f}" + (" <" if speedup == best[i] else "  ") for i, speedup in enumerate(prediction.speedups)
        ]
        rows.append([str(prediction.num_drafts), f"{prediction.tokens_a_step:.2f}", *cells])
    headers = ["k", "tokens a step", *(f"× at {batch}  " for batch in BATCHES)]
    return f"{table(headers, rows)}\n\nPredicted speed beside plain decoding, by sequences in a step; < the best k."


def _notes(plan: ServePlan) -> list[str]:
    notes = []
    capacity, largest = plan.capacity, max(BATCHES)
    crowded = [batch for batch in BATCHES if batch > plan.max_num_seqs]
    if crowded:
        notes.append(f"max_num_seqs is {plan.max_num_seqs}: steps of {' and '.join(map(str, crowded))} do not occur.")
    elif largest * plan.context_len > capacity.pool_tokens:
        fit = capacity.pool_tokens // plan.context_len
        notes.append(f"The pool holds {fit} sequences of {plan.context_len} tokens: with more some wait.")
    drafter = plan.drafter
    if plan.target.shape.assumes_dtype:
        notes.append(
            "config.json names no dtype: bfloat16 is assumed. Name the checkpoint's in `dtype` of the Serve file."
        )
    if drafter is not None and drafter.share is not None and not drafter.is_shared and plan.num_ranks > 1:
        notes.append(
            f"The {drafter.name} is whole, on rank 0, whose memory this is; of the other ranks each holds "
            f"{size(drafter.weight_bytes)} less, and as many tokens."
        )
    if drafter is not None and drafter.share is not None and drafter.has_actor:
        notes.append(
            "Drafts and the target's pass are counted one after the other; with num_microbatches 2 the draft actor "
            "drafts for one half of the sequences while the other half is verified."
        )
    if plan.target.share.keeps_fp8:
        expanded = plan.target.share.expanded_bytes + (drafter.expanded_bytes if drafter is not None else 0)
        notes.append(
            f"FP8 weights are counted as stored, a byte each and scales; expanded they would take {size(expanded)}."
        )
    return notes


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,)) -> str:
    """Columns two blanks apart; those in `left` begin at the left, the others end at the right."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def count(number: int) -> str:
    return f"{_three_digits(number / 1e9)}B" if number >= 1e9 else f"{_three_digits(number / 1e6)}M"


def size(num_bytes: float) -> str:
    """Three digits and a binary unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{_three_digits(num_bytes / scale)} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
