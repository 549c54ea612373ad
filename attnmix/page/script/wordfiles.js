// The words as a table and as a drawing.

import { data } from "./data.js";
import { byId, drawing } from "./elements.js";
import { exchanged, modelName, shadeName, shadeOf } from "./measures.js";
import { state } from "./state.js";
import { isOfClass, lookedAt, nameThere, NOTHING, shadeMeaning } from "./words.js";

/** The words where they stand now, each with its shade and lines. */
export function wordsDrawing() {
  const box = byId("words");
  const ground = box.getBoundingClientRect();
  const [width, height] = [Math.ceil(ground.width), Math.ceil(box.scrollHeight)];
  const font = { "font-family": getComputedStyle(box).fontFamily, "font-size": getComputedStyle(box).fontSize };
  const parts = [...box.children].flatMap((span) => {
    const style = getComputedStyle(span);
    const at = span.getClientRects()[0];
    const [x, y] = [at.left - ground.left, at.top - ground.top + box.scrollTop];
    const [below, above] = [Number.parseFloat(style.borderBottomWidth), Number.parseFloat(style.borderTopWidth)];
    const size = { x, width: at.width };
    return [
      drawing("rect", { ...size, y, height: at.height, fill: style.backgroundColor }),
      drawing("rect", { ...size, y: y + at.height - below, height: below, fill: state.colours.took }),
      drawing("rect", { ...size, y, height: above, fill: state.colours.gave }),
      drawing("text", { ...font, x: x + 3, y: y + 0.72 * at.height, fill: state.colours.ink }, span.textContent),
    ];
  });
  const paper = drawing("rect", { width: "100%", height: "100%", fill: state.colours.paper });
  return drawing("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, paper, ...parts);
}

export function wordsTable() {
  const { start, length } = data.documents[state.document];
  const looked = lookedAt();
  const { took, gave } = looked === null ? NOTHING : exchanged(looked);
  const columns = [
    "position",
    "token",
    `${shadeMeaning()} (${isOfClass() ? state.shade : shadeName()}, ${modelName()})`,
  ];
  const lists =
    looked === null
      ? []
      : [
          [`gave to ${nameThere(looked)}`, took],
          [`took from ${nameThere(looked)}`, gave],
        ];
  const rows = Array.from({ length }, (_, i) => {
    const shares = lists.map(([, found]) => found.find((each) => each.token === start + i)?.share);
    return [i, nameThere(start + i), shadeOf(start + i), ...shares];
  });
  return { columns: [...columns, ...lists.map(([name]) => name)], rows };
}
