"""How the block formats lie in memory: codes as words, and an output's numbers a panel apart.

The words of a block hold, for each output, 32 codes in groups of four: byte j of a group is element
4 · group + j. So a vector register holds four neighbouring elements of each output, as byte dot
products take them. Codes of 8 bits take a word a group. Of the others a word holds the lower four
bits of two groups, half a run apart (a run is what shares a scale: 16 or all 32 codes); what they
have above follows, the bits of four or eight groups in a word.
"""

from dataclasses import dataclass

import numpy as np

#: Codes of a block, in one word, and words that hold four bits of all of them.
BLOCK = 32
GROUP = 4
GROUPS = BLOCK // GROUP
NIBBLE_WORDS = 4


@dataclass(frozen=True)
class Fields:
    """Blocks of a file taken apart: [outputs, units, …]."""

    words: np.ndarray  # uint32 [outputs, units, blocks of 32, words]
    halves: np.ndarray  # uint16 [outputs, units, 16-bit scales]
    scales: np.ndarray | None = None  # uint8 [outputs, units, blocks of 32, small scales]


def words_of(codes: np.ndarray, bits: int, runs: int = 1) -> np.ndarray:
    """Codes of 4, 5 or 6 bits, uint8 [..., 32], as words, uint32 [..., bits]."""
    pairs = codes.reshape(*codes.shape[:-1], runs, 2, -1)
    parts = [(pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)]
    above = bits - 4
    if above:
        share = 8 // above  # groups whose upper bits share a word
        groups = (codes >> 4).reshape(*codes.shape[:-1], -1, share, GROUP)
        upper = groups[..., 0, :].copy()
        for group in range(1, share):
            upper |= groups[..., group, :] << above * group
        parts.append(upper)
    flat = [part.reshape(*codes.shape[:-1], -1) for part in parts]
    return np.concatenate(flat, axis=-1).view(np.uint32)


def codes_of(words: np.ndarray, bits: int, runs: int = 1) -> np.ndarray:
    """The codes in words, uint8 [..., 32] from uint32 [..., bits]: `words_of` undone."""
    stored = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stored
    whole = stored.shape[:-1]
    lower = stored[..., : 4 * NIBBLE_WORDS].reshape(*whole, runs, 1, -1)
    codes = np.concatenate([lower & 15, lower >> 4], axis=-2).reshape(*whole, BLOCK)
    above = bits - 4
    if above:
        shifts = np.arange(0, 8, above, dtype=np.uint8)[:, None]
        upper = stored[..., 4 * NIBBLE_WORDS :].reshape(*whole, -1, 1, GROUP)
        upper = (upper >> shifts) & np.uint8((1 << above) - 1)
        codes |= upper.reshape(*whole, BLOCK) << 4
    return codes


def interleave_units(values: np.ndarray, packed: np.ndarray, panel: int) -> None:
    """[outputs, units, count] to [panels, units, count · panel], an output's numbers `panel` apart.

    The rest of a last panel stays as it is.
    """
    outputs, units, count = values.shape
    places = packed.reshape(*packed.shape[:2], count, panel)
    whole = outputs // panel
    split = values[: whole * panel].reshape(whole, panel, units, count)
    places[:whole] = split.transpose(0, 2, 3, 1)
    rest = values[whole * panel :]
    if len(rest):
        places[whole, ..., : len(rest)] = rest.transpose(1, 2, 0)


def halves_at(blocks: np.ndarray, *offsets: int) -> np.ndarray:
    """The 16-bit numbers at these offsets of each block, uint16 [..., count]."""
    return np.concatenate([blocks[..., o : o + 2] for o in offsets], axis=-1).view(np.uint16)


def half(fields: Fields, number: int) -> np.ndarray:
    """A 16-bit scale of each unit as float32 [outputs, units, 1]."""
    return fields.halves[..., number : number + 1].view(np.float16).astype(np.float32)
