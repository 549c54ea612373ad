// The order of drawing: first the visible parts of the page, then the other parts one by one.

import { signal, useComputed } from "@preact/signals";
import type { FunctionComponent } from "preact";
import { showAtOnce } from "./state";

const LONGEST_FRAME = 1000; // milliseconds; pages in the background get no animation frames

/** The number of drawn parts, from the top of the page. */
const drawnParts = signal(0);

/** A part of the page below its first picture; until it is drawn, an empty box as high as the window. */
export function Later({ part, view: View }: { part: number; view: FunctionComponent }) {
  const isDrawn = useComputed(() => part < drawnParts.value);
  return isDrawn.value ? <View /> : <div class="undrawn" />;
}

const undrawn = () => document.querySelector(".undrawn");
const drawNext = () => showAtOnce(() => drawnParts.value++);

/** Draw the parts that are visible in the window. */
export function drawFirstScreen(): void {
  for (let next = undrawn(); next && next.getBoundingClientRect().top < innerHeight; next = undrawn()) drawNext();
}

/** Draw all parts synchronously, for printing and for links within the page. */
export function drawWhole(): void {
  while (undrawn()) drawNext();
}

const root = document.documentElement;
/** True after the visible parts of the page were first drawn. */
export const isReady = () => "ready" in root.dataset;

/** Set `data-ready` after the visible parts are drawn and respond, or `data-whole` after all parts are drawn. */
export const report = (drawn: "ready" | "whole") => (root.dataset[drawn] = "yes");

/** Wait until the browser has painted the drawn parts. */
export const nextFrame = () =>
  new Promise<void>((resolve) => {
    requestAnimationFrame(() => setTimeout(resolve));
    setTimeout(resolve, LONGEST_FRAME);
  });

const pause = () => new Promise((resolve) => setTimeout(resolve));

/** Draw the remaining parts with a pause before each, so that the page stays responsive. */
export async function drawRest(): Promise<void> {
  if (!undrawn()) return;
  await pause();
  drawNext();
  await drawRest();
}
