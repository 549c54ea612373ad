// When the page's parts are drawn: what the window shows first, and the rest while the browser has nothing else to do.

import { signal, useComputed } from "@preact/signals";
import type { FunctionComponent } from "preact";
import { showAtOnce } from "./state";

/** How many of the parts are drawn, from the top of the page. */
const drawnParts = signal(0);

/** A part of the page below its first picture; until it is drawn, an empty place as high as the window. */
export function Later({ part, view: View }: { part: number; view: FunctionComponent }) {
  const isDrawn = useComputed(() => part < drawnParts.value);
  return isDrawn.value ? <View /> : <div class="undrawn" />;
}

const nextPart = () => document.querySelector(".undrawn");
const drawNext = () => showAtOnce(() => drawnParts.value++);

/** Draw the parts that the window shows. */
export function drawFirstScreen(): void {
  for (let next = nextPart(); next && next.getBoundingClientRect().top < innerHeight; next = nextPart()) drawNext();
}

/** Draw all parts before this returns: paper, and links to a place on the page, do not wait. */
export function drawWhole(): void {
  while (nextPart()) drawNext();
}

/** Draw one part after the other, so that none makes a choice wait for all, and then call `whenDone`. */
export function drawRest(whenDone: () => void): void {
  if (!nextPart()) return whenDone();
  setTimeout(() => {
    drawNext();
    drawRest(whenDone);
  });
}
