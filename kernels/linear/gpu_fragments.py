"""Operands of `mma.m16n8k32` from packed weights, and that instruction, in Triton.

A group of a panel, 16 outputs by 32 inputs, is one operand as it lies in memory. Thread t of a
warp has quads t % 4 and t % 4 + 4 of outputs 2 r and 2 r + 1, r = t // 4: rows r and r + 8 of the
operand. Tensors have one number for each thread of a program, and one dimension, so that Triton has
no choice in handing out their elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nothing() -> tl.tensor:
    """Return an empty tuple, to which others are added."""
    return ()


@triton.jit
def halves(word: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the two halves in a word of 32 bits as floats."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def words(pair: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the two words of 32 bits in 64 bits."""
    return (pair & 0xFFFFFFFF).to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def loaded_group(
    group_ptr: tl.tensor,
    block_ptr: tl.tensor,
    quad: tl.tensor,
    pair: tl.tensor,
    there: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """Load what a thread needs of a group, as it lies in memory; zeros where it is not there.

    Args:
        group_ptr, block_ptr: first byte of the group and of its block.

    Returns:
        Scales of two outputs; those of their second 16 inputs, if they have others; those of their
        block, if it has any; the same of offsets; words of codes; words with higher bits of codes.
    """
    word_ptr = group_ptr.to(tl.pointer_type(tl.int32)) + pair
    raw = nothing()
    if KIND.blocked:
        short_ptr = group_ptr.to(tl.pointer_type(tl.int16)) + pair
        block_ptr = block_ptr.to(tl.pointer_type(tl.int32)) + pair
        raw += (tl.load(short_ptr + 32 * KIND.bits, mask=there, other=0),)
        if KIND.group == 16:
            raw += (tl.load(short_ptr + (32 * KIND.bits + 8), mask=there, other=0),)
        raw += (tl.load(block_ptr, mask=there, other=0),)
        if KIND.affine:
            raw += (tl.load(short_ptr + (32 * KIND.bits + 8), mask=there, other=0),)
            raw += (tl.load(block_ptr + 8, mask=there, other=0),)
    else:
        raw += (tl.load(word_ptr + 16 * KIND.bits, mask=there, other=0),)
        if KIND.affine:
            raw += (tl.load(word_ptr + (16 * KIND.bits + 8), mask=there, other=0),)
    pair_ptr = group_ptr.to(tl.pointer_type(tl.int64))
    code_ptr = pair_ptr + (quad * 8 + pair)
    raw += (tl.load(code_ptr, mask=there, other=0),)
    if KIND.bits == 8:
        raw += (tl.load(code_ptr + 32, mask=there, other=0),)
    if KIND.bits == 5 or KIND.bits == 6:
        raw += (tl.load(pair_ptr + pair + 32, mask=there, other=0),)
    if KIND.bits == 6:
        raw += (tl.load(pair_ptr + pair + 40, mask=there, other=0),)
    return raw


@triton.jit
def two_scales(raw: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the scales of two outputs as floats, from a `loaded_group`."""
    if KIND.blocked:
        first, second = halves(raw[1 if KIND.group == 32 else 2])
        codes = raw[0].to(tl.int32)
        first *= (codes << 24 >> 24).to(tl.float32)
        second *= (codes << 16 >> 24).to(tl.float32)
    else:
        first, second = halves(raw[0])
    return first, second


@triton.jit
def later_scales(raw: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the scales of the second 16 inputs of two outputs; see `two_scales`."""
    first, second = halves(raw[2])
    codes = raw[1].to(tl.int32)
    first *= (codes << 24 >> 24).to(tl.float32)
    second *= (codes << 16 >> 24).to(tl.float32)
    return first, second


@triton.jit
def two_offsets(raw: tl.tensor, KIND: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the offsets of two outputs as floats; affine kinds only; see `two_scales`."""
    if KIND.blocked:
        first, second = halves(raw[3])
        codes = raw[2].to(tl.int32)
        first *= -(codes & 255).to(tl.float32)
        second *= -(codes >> 8 & 255).to(tl.float32)
    else:
        first, second = halves(raw[1])
    return first, second


@triton.jit
def table_words(
    table_ptr: tl.tensor, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load the table of a kind, four values in a word; without a table they mean nothing."""
    word_ptr = table_ptr.to(tl.pointer_type(tl.int32))
    return tl.load(word_ptr), tl.load(word_ptr + 1), tl.load(word_ptr + 2), tl.load(word_ptr + 3)


@triton.jit
def looked_up_bytes(
    codes: tl.tensor,
    t0: tl.tensor,
    t1: tl.tensor,
    t2: tl.tensor,
    t3: tl.tensor,
    ASM: tl.constexpr,
) -> tl.tensor:
    """Replace the four codes of a word, 0 to 15 each, by bytes of the table in four words."""
    if ASM:
        # a digit of a selector is a code without its highest bit, which chooses between two results
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 s, t, low, high;
            shr.u32 s, $1, 4;
            or.b32 s, s, $1;
            prmt.b32 s, s, 0, 0x4420;
            and.b32 t, s, 0x7777;
            prmt.b32 low, $2, $3, t;
            prmt.b32 high, $4, $5, t;
            and.b32 t, s, 0x8888;
            shr.u32 t, t, 1;
            or.b32 t, t, 0x3210;
            prmt.b32 $0, low, high, t;
            }""",
            "=r,r,r,r,r,r",
            [codes, t0, t1, t2, t3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        result = codes * 0
        for byte in tl.static_range(4):
            code = codes >> 8 * byte & 15
            word = tl.where(code < 8, tl.where(code < 4, t0, t1), tl.where(code < 12, t2, t3))
            result |= (word >> 8 * (code & 3) & 255) << 8 * byte
    return result


@triton.jit
def signed_nibbles(words: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Return the high nibbles of bytes, less 8, in the high nibbles of signed bytes."""
    if ASM:
        # one instruction, where Triton makes two
        result = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;",
            "=r,r,r,r",
            [words, -252645136, -2139062144],  # 0xF0F0F0F0, 0x80808080
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        result = words & -252645136 ^ -2139062144
    return result


@triton.jit
def code_bytes(
    raw: tl.tensor,
    quad: tl.tensor,
    table: tl.tensor,
    KIND: tl.constexpr,
    ASM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the codes of a `loaded_group` as the four words a0 to a3 of each thread.

    Bytes of symmetric kinds are the codes less their zero, which is half their range, in the
    highest bits. Codes of affine kinds of fewer than 8 bits are unsigned, and those of 8 bits are
    128 less.
    """
    FIRST: tl.constexpr = (2 if KIND.affine or KIND.group == 16 else 1) + (
        2 if KIND.affine and KIND.blocked else 1 if KIND.blocked else 0
    )
    t0, t1, t2, t3 = table
    first, second = words(raw[FIRST])
    if KIND.bits == 8:
        third, fourth = words(raw[FIRST + 1])
    elif KIND.bits == 4 and KIND.table is None and not KIND.affine:
        third, fourth = signed_nibbles(first, ASM), signed_nibbles(second, ASM)
        first, second = signed_nibbles(first << 4, ASM), signed_nibbles(second << 4, ASM)
    else:
        third, fourth = first >> 4 & 0x0F0F0F0F, second >> 4 & 0x0F0F0F0F
        first, second = first & 0x0F0F0F0F, second & 0x0F0F0F0F
        if KIND.bits == 5:
            high, other = words(raw[FIRST + 1])
            first |= (high >> quad & 0x01010101) << 4
            second |= (other >> quad & 0x01010101) << 4
            third |= (high >> quad + 4 & 0x01010101) << 4
            fourth |= (other >> quad + 4 & 0x01010101) << 4
        if KIND.bits == 6:
            high, other = words(raw[FIRST + 1])
            first |= (high >> 2 * quad & 0x03030303) << 4
            second |= (other >> 2 * quad & 0x03030303) << 4
            high, other = words(raw[FIRST + 2])
            third |= (high >> 2 * quad & 0x03030303) << 4
            fourth |= (other >> 2 * quad & 0x03030303) << 4
        if KIND.table is not None:
            first = looked_up_bytes(first, t0, t1, t2, t3, ASM)
            second = looked_up_bytes(second, t0, t1, t2, t3, ASM)
            third = looked_up_bytes(third, t0, t1, t2, t3, ASM)
            fourth = looked_up_bytes(fourth, t0, t1, t2, t3, ASM)
        elif not KIND.affine:
            SHIFT: tl.constexpr = 8 - KIND.bits
            first = first << SHIFT ^ -2139062144  # 0x80808080
            second = second << SHIFT ^ -2139062144
            third = third << SHIFT ^ -2139062144
            fourth = fourth << SHIFT ^ -2139062144
    return first, second, third, fourth


@triton.jit
def byte_of(word: tl.tensor, BYTE: tl.constexpr, UNSIGNED: tl.constexpr) -> tl.tensor:
    """Return a byte of a word as an integer."""
    return word >> 8 * BYTE & 255 if UNSIGNED else word << 24 - 8 * BYTE >> 24


@triton.jit
def sums(
    a0: tl.tensor, a1: tl.tensor, b: tl.tensor, UNSIGNED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Compute what `mma.m16n8k16` does, without it."""
    WARPS: tl.constexpr = b.shape[0] // 32
    upper = tl.zeros([WARPS, 8, 8], tl.int32)
    lower = tl.zeros([WARPS, 8, 8], tl.int32)
    for byte in tl.static_range(4):
        x = tl.reshape(byte_of(b, byte, False), [WARPS, 1, 8, 4])
        w = tl.reshape(byte_of(a0, byte, UNSIGNED), [WARPS, 8, 1, 4])
        upper += tl.sum(w * x, axis=3)
        w = tl.reshape(byte_of(a1, byte, UNSIGNED), [WARPS, 8, 1, 4])
        lower += tl.sum(w * x, axis=3)
    d0, d1 = tl.split(tl.reshape(upper, [WARPS * 32, 2]))
    d2, d3 = tl.split(tl.reshape(lower, [WARPS * 32, 2]))
    return d0, d1, d2, d3


@triton.jit
def multiplied(
    a0: tl.tensor,
    a1: tl.tensor,
    a2: tl.tensor,
    a3: tl.tensor,
    b0: tl.tensor,
    b1: tl.tensor,
    UNSIGNED: tl.constexpr,
    ASM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Multiply 16 outputs by 8 rows over 32 inputs, as floats.

    Sums start from the bits of 1.5 * 2^23, so that they are floats as well; converting an integer
    takes four times as long as the subtraction.

    Returns:
        Sums of outputs 2 r and rows 2 c and 2 c + 1, then those of outputs 2 r + 1, for thread
        4 r + c.
    """
    if ASM:
        TYPE: tl.constexpr = "u8" if UNSIGNED else "s8"
        d0, d1, d2, d3 = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32." + TYPE + ".s8.s32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $10, $10, $10};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, 0x4B400000],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        d0, d1 = as_float(d0), as_float(d1)
        d2, d3 = as_float(d2), as_float(d3)
    else:
        d0, d1, d2, d3 = sums(a0, a1, b0, UNSIGNED)
        e0, e1, e2, e3 = sums(a2, a3, b1, UNSIGNED)
        d0, d1 = (d0 + e0).to(tl.float32), (d1 + e1).to(tl.float32)
        d2, d3 = (d2 + e2).to(tl.float32), (d3 + e3).to(tl.float32)
    return d0, d1, d2, d3


@triton.jit
def half_multiplied(
    a0: tl.tensor, a1: tl.tensor, b: tl.tensor, ASM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Multiply as `multiplied` does over 16 inputs, with signed codes."""
    if ASM:
        d0, d1, d2, d3 = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
            "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $7, $7, $7};",
            "=r,=r,=r,=r,r,r,r,r",
            [a0, a1, b, 0x4B400000],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        d0, d1 = as_float(d0), as_float(d1)
        d2, d3 = as_float(d2), as_float(d3)
    else:
        d0, d1, d2, d3 = sums(a0, a1, b, False)
        d0, d1 = d0.to(tl.float32), d1.to(tl.float32)
        d2, d3 = d2.to(tl.float32), d3.to(tl.float32)
    return d0, d1, d2, d3


@triton.jit
def as_float(bits: tl.tensor) -> tl.tensor:
    """Return the integer that was added to the bits of 1.5 * 2^23."""
    return bits.to(tl.float32, bitcast=True) - 12582912.0
