"""Bytes without an owner. A function over `Span[UInt8, _]` is compiled anew for each owner that it is called with; the
long ones here take `Bytes` behind a short one that takes any span.
"""

comptime Bytes = Span[UInt8, ImmUntrackedOrigin]
"""Bytes that whoever passes them keeps alive."""


@always_inline
def untracked(data: Span[UInt8, _]) -> Bytes:
    """The same bytes, which the caller keeps alive.

    Args:
        data: The bytes.

    Returns:
        The bytes.
    """
    return Bytes(
        unsafe_ptr=Pointer[UInt8, ImmUntrackedOrigin](
            unsafe_from_address=Int(data.unsafe_ptr())
        ),
        length=len(data),
    )
