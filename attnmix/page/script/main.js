// The views, and how they look on the screen and printed.

import { readAddress, writeAddress } from "./address.js";
import { buildBeside, drawBeside } from "./beside.js";
import { drawHovered } from "./camera.js";
import { drawCard, drawCourse } from "./card.js";
import { drawMapLegend } from "./colours.js";
import { drawBesides, drawControls, drawHeads, drawPlay, drawPoint, drawSelection } from "./controls.js";
import { drawDifference, drawMixing } from "./curves.js";
import { data } from "./data.js";
import { byId } from "./elements.js";
import { drawHeadLines } from "./heads.js";
import { drawHeadsNote, drawHeadsSaid } from "./headwords.js";
import { drawMap, drawMapKey, drawNote } from "./map.js";
import { drawNeuron } from "./neuron.js";
import { drawOverview, drawTypical } from "./overview.js";
import { drawNearest } from "./nearest.js";
import { register } from "./panes.js";
import { drawPointing } from "./pointing.js";
import { drawMovement, drawQuality } from "./quality.js";
import { drawFound } from "./search.js";
import { change, drawEverything, drawOneByOne, show, showSeen, state } from "./state.js";
import { drawSteps } from "./steps.js";
import { drawStory } from "./story.js";
import { buildWords, drawMarks, drawPointed, drawSelected, drawShades, drawTextLegend, drawTextName } from "./text.js";
import { drawHeadMatrix, drawPressed, drawThumbnails } from "./thumbnails.js";
import { wordsDrawing, wordsTable } from "./wordfiles.js";

// Those that are drawn when they are seen, by the element of each.
const PANES = { overview: drawOverview, "map-chart": drawMap, "mixing-chart": drawMixing, "steps-chart": drawSteps };
const HEAD_PANES = {
  "heads-lines": drawHeadLines,
  "heads-square": drawHeadMatrix,
  "heads-all": drawThumbnails,
  neuron: drawNeuron,
};
const root = document.documentElement;
const scheme = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = "paper panel line edge ink soft mark took gave shade less".split(" "); // of the style sheet

/** Paper is white, and has a width of its own. */
function look(printing) {
  root.classList.toggle("printing", printing);
  const style = getComputedStyle(root);
  const colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  change({ printing, dark: scheme.matches && !printing, colours });
}

register("words", wordsTable, wordsDrawing);
look(false);
readAddress();
show(drawHeads, drawControls, drawBesides, drawSelection, drawTypical, drawDifference);
show(drawPlay, drawPoint, drawNote, drawMapKey, drawMapLegend, drawQuality, drawMovement, drawHovered, drawPointing);
show(buildWords, drawShades, drawMarks, drawSelected, drawPointed, drawTextLegend, drawTextName, drawFound);
show(drawStory, buildBeside, drawBeside, drawCard, drawCourse, drawNearest, writeAddress);
for (const [id, draw] of Object.entries(PANES)) showSeen(byId(id), draw);
if (data.attention.number > 0) {
  show(drawHeadsNote, drawHeadsSaid, drawPressed);
  for (const [id, draw] of Object.entries(HEAD_PANES)) showSeen(byId(id), draw);
}
scheme.addEventListener("change", () => look(state.printing));
addEventListener("beforeprint", () => {
  look(true);
  drawEverything();
});
addEventListener("afterprint", () => look(false));
// What stands above a link's end and is drawn only later would grow, and move that end.
const followsLink = ({ target }) => target.closest("a[href^='#']") && drawEverything();
document.addEventListener("click", followsLink, { capture: true });
root.dataset.ready = "yes";
// A pane that grew when it comes into sight would push away what someone is about to click.
drawOneByOne(() => {
  root.dataset.drawn = "yes";
});
