"""Perceptual colour differences, implemented from their publications: CIELAB, CIEDE2000, simulated deuteranopia."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])  # D65
# Matrix of Machado, Oliveira, Fernandes (2009) for linear sRGB, severity 1.0.
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)


def linear(hexadecimal: str) -> Doubles:
    """Return the linear RGB components of a colour such as `#b34a00`."""
    parts = np.array(list(bytes.fromhex(hexadecimal.removeprefix("#"))), dtype=float) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def without_green_cones(parts: Doubles) -> Doubles:
    """Return a linear colour as seen with deuteranopia."""
    return np.clip(DEUTERANOPIA @ parts, 0, 1)


def lab(parts: Doubles) -> Doubles:
    """Return the CIELAB coordinates of a linear colour."""
    relative = TO_XYZ @ parts / WHITE
    roots = np.where(relative > 216 / 24389, np.cbrt(relative), (24389 / 27 * relative + 16) / 116)
    return np.array([116 * roots[1] - 16, 500 * (roots[0] - roots[1]), 200 * (roots[1] - roots[2])])


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours as defined in WCAG."""
    luminances = sorted(float(TO_XYZ[1] @ linear(each)) for each in (one, other))
    return (luminances[1] + 0.05) / (luminances[0] + 0.05)


def distance(one: Doubles, other: Doubles) -> float:
    """Return the CIEDE2000 distance of two colours in CIELAB (Sharma, Wu, Dalal, 2005)."""
    l_1, a_1, b_1 = one
    l_2, a_2, b_2 = other
    # Chroma and hue (in degrees) after the axis a is stretched for colours with little chroma.
    mean_chroma = (np.hypot(a_1, b_1) + np.hypot(a_2, b_2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(mean_chroma**7 / (mean_chroma**7 + 25**7))
    c_1, c_2 = np.hypot(stretch * a_1, b_1), np.hypot(stretch * a_2, b_2)
    h_1 = np.degrees(np.arctan2(b_1, stretch * a_1)) % 360
    h_2 = np.degrees(np.arctan2(b_2, stretch * a_2)) % 360
    # Differences and means of both colours; the hue of a grey (chroma 0) is ignored.
    turn = (h_2 - h_1 + 180) % 360 - 180 if c_1 * c_2 else 0.0
    mean_hue = (h_1 + turn / 2) % 360 if c_1 * c_2 else h_1 + h_2
    mean_l, mean_c = (l_1 + l_2) / 2, (c_1 + c_2) / 2
    hue = 2 * np.sqrt(c_1 * c_2) * np.sin(np.radians(turn / 2))
    # Weights S_L, S_C and S_H of the publication; each item of `harmonics` is a multiple of the hue, an offset and an
    # amplitude.
    harmonics = ((1, -30, -0.17), (2, 0, 0.24), (3, 6, 0.32), (4, -63, -0.20))
    hue_weight = 1 + sum(size * np.cos(np.radians(times * mean_hue + offset)) for times, offset, size in harmonics)
    scale_l = 1 + 0.015 * (mean_l - 50) ** 2 / np.sqrt(20 + (mean_l - 50) ** 2)
    scale_c = 1 + 0.045 * mean_c
    scale_h = 1 + 0.015 * mean_c * hue_weight
    # R_T of the publication: the interaction of chroma and hue in the blue region.
    rotation = -2 * np.sqrt(mean_c**7 / (mean_c**7 + 25**7))
    rotation *= np.sin(np.radians(60 * np.exp(-(((mean_hue - 275) / 25) ** 2))))
    lightness = (l_2 - l_1) / scale_l
    chroma = (c_2 - c_1) / scale_c
    hue /= scale_h
    return float(np.sqrt(lightness**2 + chroma**2 + hue**2 + rotation * chroma * hue))


SCALE = {1: ("#ffffff", "#5896cc", "#00386f"), -1: ("#ffffff", "#d07f45", "#7a2c00")}
"""Colours of the light page's scale at the values 0, 0.5 and 1 (key 1), and at 0, -0.5 and -1 (key -1)."""


def shade(position: float) -> Doubles:
    """Return the CIELAB colour at a position between -1 and 1 on the page's scale."""
    colours = [lab(linear(colour)) for colour in SCALE[1 if position >= 0 else -1]]
    return np.array([np.interp(min(abs(position), 1), (0, 0.5, 1), part) for part in np.transpose(colours)])


def as_lab(computed: str) -> Doubles:
    """Return the CIELAB coordinates of a colour in a browser's notation, such as `rgb(0, 114, 178)`."""
    red, green, blue = (int(part) for part in re.findall(r"\d+", computed)[:3])
    return lab(linear(f"#{red:02x}{green:02x}{blue:02x}"))
