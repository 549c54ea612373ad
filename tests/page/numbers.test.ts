// Number formats, colours of values, and the alignment of two texts.

import assert from "node:assert/strict";
import test from "node:test";
import type { Column } from "../../attnmix/page/src/alignment";
import { openPage } from "./open";
import { makeRun, numbers, random } from "./run";

const VOCABULARY = ["the", "film", "was", "good"];
const TEXTS = numbers(12).map((n) => numbers(1 + n).map(() => VOCABULARY[Math.floor(4 * random())]));
const run = makeRun(TEXTS);
const { alignment, format, colours } = await openPage(run.payload);
const dark = await openPage(run.payload, {}, "", true);

test("signs are those of the rounded numbers", () => {
  const { percent, wholePercent, signed, inPoints, points, figures } = format;
  assert.deepEqual(
    [0, 0.0004, 0.0005, 0.5213, 1].map((each) => percent(each)),
    ["0.0%", "<0.1%", "0.1%", "52.1%", "100.0%"],
  );
  assert.deepEqual([0.005, 0.5213].map(wholePercent), ["1%", "52%"]);
  assert.deepEqual(
    [0.004, -0.004, 0.126, -0.126].map((each) => signed(each)),
    ["0.00", "0.00", "+0.13", "−0.13"],
  );
  assert.deepEqual([0.05213, -0.05213, -0.0004].map(inPoints), ["+5.2", "−5.2", "0.0"]);
  assert.equal(points(-0.25), "−25.0 points");
  assert.deepEqual([0, 0.01234, -1.23456, 123.456, 12345, 0.00012].map(figures), [
    "0.000",
    "0.012",
    "−1.235",
    "123.46",
    "1.2e+4",
    "1.2e−4",
  ]);
});

test("changes have enough digits to distinguish ends from 0", () => {
  const alike = (shares: number[]) => format.pointsAlike(shares, shares.slice(1));
  assert.deepEqual(alike([0.0003, -0.0004, 0.001]), ["+0.03", "−0.04", "+0.10"]);
  assert.deepEqual(alike([0.0003, -0.02, 0.03]), ["0.0", "−2.0", "+3.0"]);
  assert.deepEqual(alike([0, 0, 0]), ["0.0", "0.0", "0.0"]);
  assert.deepEqual(alike([0.000003, -0.000004, 0.1]), ["0.0", "0.0", "+10.0"]); // three digits do not suffice
});

/** The length of the longest common subsequence, computed recursively. */
function commonLength(one: string[], other: string[]): number {
  if (one.length === 0 || other.length === 0) return 0;
  const [first, ...rest] = one;
  const without = commonLength(rest, other);
  const index = other.indexOf(first);
  return index < 0 ? without : Math.max(without, 1 + commonLength(rest, other.slice(index + 1)));
}

test("columns keep the order of tokens and align as many equal ones as possible", () => {
  for (const one of numbers(TEXTS.length))
    for (const other of numbers(TEXTS.length)) {
      const columns = alignment.columnsOf(one, other);
      for (const [side, text] of [
        ["first", one],
        ["second", other],
      ] as const) {
        const tokens = columns.map((column) => column[side]).filter((token) => token !== null);
        assert.deepEqual(
          tokens,
          numbers(TEXTS[text].length).map((n) => run.starts[text] + n),
        );
      }
      const names = run.texts.flat();
      const isEqual = ({ first, second }: Column) =>
        first !== null && second !== null && names[first] === names[second];
      const equal = columns.filter(isEqual).length;
      assert.equal(equal, commonLength(TEXTS[one], TEXTS[other]));
      assert.deepEqual(columns.map(alignment.isSame), columns.map(isEqual));
      assert.equal(alignment.areAlike(one, other), equal > columns.length / 2);
      for (const [n, { first, second }] of columns.slice(1).entries()) {
        // Unmatched tokens of both texts share columns.
        assert.ok(!(columns[n].first === null && second === null), `${one}, ${other}`);
        assert.ok(!(columns[n].second === null && first === null), `${one}, ${other}`);
      }
    }
});

const partsOf = (colour: string) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
const linear = (part: number) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
function luminance(colour: string): number {
  const [red, green, blue] = partsOf(colour).map(linear);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
/** L* of CIELAB, from 0 to 100. */
const lightness = (colour: string) => {
  const relative = luminance(colour);
  return relative > 216 / 24389 ? 116 * Math.cbrt(relative) - 16 : (24389 / 27) * relative;
};

test("larger values have stronger shades with readable text", () => {
  const ends = {
    light: { more: ["#ffffff", "#5896cc", "#00386f"], less: ["#ffffff", "#d07f45", "#7a2c00"] },
    dark: { more: ["#14171c", "#3d7fb5", "#b5e0ff"], less: ["#14171c", "#a8652f", "#ffc48e"] },
  };
  const themes = { light: colours.shade, dark: dark.colours.shade };
  for (const theme of ["light", "dark"] as const)
    for (const [sign, stops] of [
      [1, ends[theme].more],
      [-1, ends[theme].less],
    ] as const) {
      const shades = numbers(201).map((step) => themes[theme]((sign * step) / 200));
      assert.deepEqual(
        [0, 100, 200].map((step) => shades[step].colour),
        stops,
      );
      assert.deepEqual(themes[theme](3 * sign), shades[200]);
      for (const [step, { colour, ink }] of shades.entries()) {
        const [from, to] = step < 100 ? stops : stops.slice(1);
        const part = (step % 100) / 100;
        const expected = lightness(from) + (step === 200 ? 1 : part) * (lightness(to) - lightness(from));
        assert.ok(Math.abs(lightness(colour) - expected) < 1, `${theme} ${sign * step}: ${colour}`);
        const contrast = (luminance(colour) + 0.05) / (luminance(ink) + 0.05);
        assert.ok(Math.max(contrast, 1 / contrast) > 4.5, `${theme} ${sign * step}: ${ink} on ${colour}`);
      }
      const steps = shades.slice(1).map(({ colour }, n) => lightness(colour) - lightness(shades[n].colour));
      assert.ok(theme === "light" ? Math.max(...steps) < 0.3 : Math.min(...steps) > -0.3);
    }
});

test("a line's strength is the square root of its share", () => {
  assert.deepEqual([-1, 0, 0.25, 1, 4].map(colours.strength), [0, 0, 0.5, 1, 1]);
});
