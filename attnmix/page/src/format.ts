// Numbers as text.

export const minusSign = (text: string) => text.replace("-", "−");
/** Format `0.5213` as `52.1%`. Halves are rounded up, although `100 * 0.575` is slightly less than 57.5. */
export const percent = (share: number, digits = 1): string =>
  share > 0 && share < 0.05 / 100 ? "<0.1%" : `${Number((100 * share).toPrecision(12)).toFixed(digits)}%`;
export const wholePercent = (share: number): string => percent(share, 0);
/** Format a number with its sign; zero has no sign. */
export const signed = (number: number, digits = 2): string => {
  const text = number.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : minusSign(number > 0 ? `+${text}` : text);
};
/** Format a difference of shares in percentage points. */
export const inPoints = (share: number): string => signed(100 * share, 1);
/** Format differences with the same number of digits, at most three, so that no nonzero end is rounded to 0. */
export function pointsAlike(shares: number[], ends: number[]): string[] {
  const isHidden = (digits: number) => ends.some((each) => each !== 0 && Number((100 * each).toFixed(digits)) === 0);
  const digits = [1, 2, 3].find((each) => !isHidden(each)) ?? 1;
  return shares.map((each) => signed(100 * each, digits));
}
export const points = (share: number): string => `${inPoints(share)} points`;
/** Format a number of any magnitude with few digits. */
export const figures = (value: number): string => {
  const size = Math.abs(value);
  const plain = size === 0 || (size >= 0.001 && size < 1000);
  return minusSign(plain ? value.toFixed(size >= 10 ? 2 : 3) : value.toExponential(1));
};
