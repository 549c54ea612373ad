// When the page's parts are drawn: what the window shows first, and then the rest, one part after the other.

import { signal, useComputed } from "@preact/signals";
import type { FunctionComponent } from "preact";
import { showAtOnce } from "./state";

const LONGEST_FRAME = 1000; // milliseconds; a page in the background has no frames, and is not to wait for one

/** How many of the parts are drawn, from the top of the page. */
const drawnParts = signal(0);

/** A part of the page below its first picture; until it is drawn, an empty place as high as the window. */
export function Later({ part, view: View }: { part: number; view: FunctionComponent }) {
  const isDrawn = useComputed(() => part < drawnParts.value);
  return isDrawn.value ? <View /> : <div class="undrawn" />;
}

const undrawn = () => document.querySelector(".undrawn");
const drawNext = () => showAtOnce(() => drawnParts.value++);

/** Draw the parts that the window shows. */
export function drawFirstScreen(): void {
  for (let next = undrawn(); next && next.getBoundingClientRect().top < innerHeight; next = undrawn()) drawNext();
}

/** Draw all parts before this returns: paper, and links to a place on the page, do not wait. */
export function drawWhole(): void {
  while (undrawn()) drawNext();
}

const root = document.documentElement;
/** Whether the window has shown all that belongs into it as the page opens. */
export const isReady = () => "ready" in root.dataset;

/** Say what is drawn: `data-ready` that the window's part is, and reacts; `data-whole` that all parts are. */
export const report = (drawn: "ready" | "whole") => (root.dataset[drawn] = "yes");

/** Wait until the window shows what was drawn. */
export const nextFrame = () =>
  new Promise<void>((resolve) => {
    requestAnimationFrame(() => setTimeout(resolve));
    setTimeout(resolve, LONGEST_FRAME);
  });

const pause = () => new Promise((resolve) => setTimeout(resolve));

/** Draw all parts with a pause before each, in which the page reacts. */
export async function drawRest(): Promise<void> {
  if (!undrawn()) return;
  await pause();
  drawNext();
  await drawRest();
}
