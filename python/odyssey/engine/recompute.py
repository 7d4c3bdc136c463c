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

    def repeated(slot: Slot, at: int) -> tuple[list[Record], Slot] | None:
        """The records that make the slot's value once more before record `at`, and where; None
        if they cannot.
        """
        maker, *others = makers[id(slot)]
        if (
            others
            or maker.phase == "backward"
            or "again" not in maker.declared.traits
            or maker.args[0] is not slot
        ):
            return None
        new = maker.changed(args=[*maker.args], phase="backward", recompute=True)
        before = []
        for j, a in enumerate(maker.args):
            if not isinstance(a, Slot) or a is slot:
                continue
            if id(a) in dropped or uses[id(a)][-1] < at:
                made = repeated(a, at)
                if made is None:
                    return None
                before += made[0]
                new.args[j] = made[1]
            elif len(makers[id(a)]) > 1:
                return None
        sizes = maker.declared.sizes
        if "again" in sizes:
            new.args[sizes.index("again") - len(sizes)] = 1
        new.args[0] = Slot(slot.nbytes)
        return [*before, new], new.args[0]

    inserted: dict[int, list[Record]] = {}
    out = list(records)
    for r in records[:start]:
        slot = r.args[0] if r.declared.outputs else None
        again = [i for i in uses.get(id(slot), []) if i >= start]
        made = repeated(slot, again[0]) if again else None
        if made is None:
            continue
        dropped.add(id(slot))
        inserted.setdefault(again[0], []).extend(made[0])
        for i in again:
            out[i] = out[i].changed(args=[made[1] if a is slot else a for a in out[i].args])
        for new in made[0]:
            new.device = records[again[0]].device
            new.tag = records[again[0]].tag
    return [r for i, one in enumerate(out) for r in (*inserted.get(i, ()), one)]
