// The colour scale, from the background colour (0) to the end colour. It is the same in all layers and models.

import { interpolateLab, piecewise, rgb } from "d3";
import { dark } from "./state";

const PAPER = { light: "#ffffff", dark: "#14171c" };
/** The colours at the middle and at the end of each scale; lightness changes evenly. */
const COLOURS = {
  light: { more: ["#5896cc", "#00386f"], less: ["#d07f45", "#7a2c00"], source: ["#e39a5f", "#b34a00"] },
  dark: { more: ["#3d7fb5", "#b5e0ff"], less: ["#a8652f", "#ffc48e"], source: ["#a8652f", "#ff9d4d"] },
};
/** The colours of categories on the map: kinds of tokens, texts, and classes. */
const KINDS = {
  light: ["#2c67de", "#8a0000", "#285850", "#de6478", "#1c1c8a", "#6d688a", "#5c95cd", "#482720"],
  dark: ["#00aaff", "#bc5e00", "#ffffbf", "#187a49", "#dfbfff", "#006fde", "#cdab9a", "#376e7a"],
};
const STEPS = 200;
const EQUAL_CONTRAST = 0.179; // luminance on which black and white are equally readable

type Theme = keyof typeof COLOURS;
/** The meaning of a colour: a value above 0, a value below 0, or the share of a source. */
type Meaning = keyof typeof COLOURS.light;
type Shade = { colour: string; ink: string };

const linear = (part: number) => (part <= 0.03928 * 255 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
function luminance(colour: string): number {
  const { r, g, b } = rgb(colour);
  return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
}

function shadesOf(theme: Theme, meaning: Meaning): Shade[] {
  const mixed = piecewise(interpolateLab, [PAPER[theme], ...COLOURS[theme][meaning]]);
  return Array.from({ length: STEPS + 1 }, (_, step) => {
    const colour = rgb(mixed(step / STEPS)).formatHex();
    return { colour, ink: luminance(colour) > EQUAL_CONTRAST ? "#000000" : "#ffffff" };
  });
}

/** The scales that were used so far; an opening page needs two of the six. */
const shades: Record<Theme, Partial<Record<Meaning, Shade[]>>> = { light: {}, dark: {} };

/** The colour of a value between -1 and 1, and the colour of text on it. */
export function shade(place: number, meaning: Meaning = place < 0 ? "less" : "more"): Shade {
  const strength = Math.min(Math.abs(place), 1);
  const theme = dark.value ? "dark" : "light";
  const scale = (shades[theme][meaning] ??= shadesOf(theme, meaning));
  return scale[Math.round(strength * STEPS)];
}

export const kindColours = () => KINDS[dark.value ? "dark" : "light"];

/** The strength of the line or mark of a share, from 0 to 1: its square root, so that small shares are visible. */
export const strength = (share: number) => Math.sqrt(Math.min(Math.max(share, 0), 1));
