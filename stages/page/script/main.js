// The views, and how they look on the screen and printed.

import { readAddress, writeAddress } from "./address.js";
import { PRINTED } from "./charts.js";
import { drawMapLegend } from "./colours.js";
import { drawControls, drawHeads, drawPlay, drawPoint, drawSelection } from "./controls.js";
import { drawDifference, drawMixing, drawSteps } from "./curves.js";
import { byId } from "./elements.js";
import { drawMap, drawMovement, drawQuality } from "./map.js";
import { drawOverview, drawTypical } from "./overview.js";
import { drawFound } from "./search.js";
import { change, show, state } from "./state.js";
import { buildWords, drawPointed, drawSources, drawTextLegend, drawWords } from "./text.js";

const root = document.documentElement;
const scheme = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = ["paper", "panel", "line", "ink", "soft", "mark", "took", "shade"]; // of the style sheet

/** Paper has a width of its own, and is white. */
function look(printing) {
  root.classList.toggle("printing", printing);
  const style = getComputedStyle(root);
  const colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const width = printing ? PRINTED.width : byId("overview").clientWidth;
  change({ printing, dark: scheme.matches && !printing, colours, width });
}

look(false);
readAddress();
show(drawHeads, drawControls, drawSelection, drawOverview, drawTypical, drawMixing, drawDifference, drawSteps);
show(drawPlay, drawPoint, drawMap, drawMapLegend, drawQuality, drawMovement);
show(buildWords, drawWords, drawPointed, drawTextLegend, drawSources, drawFound, writeAddress);
scheme.addEventListener("change", () => look(state.printing));
addEventListener("beforeprint", () => look(true));
addEventListener("afterprint", () => {
  look(false);
  for (const id of ["map-chart", "mixing-chart", "steps-chart"]) Plotly.Plots.resize(byId(id));
});
root.dataset.ready = "yes";
