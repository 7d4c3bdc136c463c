"""Values of the forward pass that the backward pass reads: kept, or computed again from what is
kept anyway.
"""

from __future__ import annotations

from ..core.program import Record, Slot, slot_users


def recompute(records: list[Record]) -> list[Record]:  # noqa: C901
    """The same program with less to keep from the forward pass to the backward pass.

    What an op with the trait "again" makes (padding, a normalised batch) is made once more before
    the first backward record that reads it, if all that it is made of is there at that time anyway.
    Records that are changed are copies.
    """
    start = next((i for i, r in enumerate(records) if r.phase == "backward"), len(records))
    uses = slot_users(records)
    makers: dict[int, list[Record]] = {}
    for r in records:
        for a in r.args[: len(r.declared.outputs)]:
            makers.setdefault(id(a), []).append(r)
    dropped: set[int] = set()  # slots that are not kept

    def repeated(slot: Slot, index: int) -> tuple[list[Record], Slot] | None:
        """The records that make the slot's value once more before record `index`, and where; None
        if they cannot.
        """
        maker, *other_makers = makers[id(slot)]
        if (
            other_makers
            or maker.phase == "backward"
            or "again" not in maker.declared.traits
            or maker.args[0] is not slot
        ):
            return None
        new = maker.changed(args=[*maker.args], phase="backward", recompute=True)
        prerequisites = []
        for j, a in enumerate(maker.args):
            if not isinstance(a, Slot) or a is slot:
                continue
            if id(a) in dropped or uses[id(a)][-1] < index:
                repetition = repeated(a, index)
                if repetition is None:
                    return None
                prerequisites += repetition[0]
                new.args[j] = repetition[1]
            elif len(makers[id(a)]) > 1:
                return None
        sizes = maker.declared.sizes
        if "again" in sizes:
            new.args[sizes.index("again") - len(sizes)] = 1
        new.args[0] = Slot(slot.nbytes)
        return [*prerequisites, new], new.args[0]

    inserted: dict[int, list[Record]] = {}
    out = list(records)
    for r in records[:start]:
        slot = r.args[0] if r.declared.outputs else None
        late_uses = [i for i in uses.get(id(slot), []) if i >= start]
        repetition = repeated(slot, late_uses[0]) if late_uses else None
        if repetition is None:
            continue
        dropped.add(id(slot))
        inserted.setdefault(late_uses[0], []).extend(repetition[0])
        for i in late_uses:
            out[i] = out[i].changed(args=[repetition[1] if a is slot else a for a in out[i].args])
        for new in repetition[0]:
            new.device = records[late_uses[0]].device
            new.tag = records[late_uses[0]].tag
    return [r for i, one in enumerate(out) for r in (*inserted.get(i, ()), one)]
