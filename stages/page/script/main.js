// The views, and how they look on the screen and printed.

import { drawMapLegend } from "./colours.js";
import { drawControls, drawHeads, drawPlay, drawPoint, drawSelection } from "./controls.js";
import { drawDifference, drawMixing, drawSteps } from "./curves.js";
import { byId } from "./elements.js";
import { drawMap, drawMovement, drawQuality } from "./map.js";
import { change, show, state } from "./state.js";
import { buildWords, drawPointed, drawSources, drawTextLegend, drawWords } from "./text.js";

const root = document.documentElement;
const scheme = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = ["paper", "line", "ink", "soft", "mark", "took", "shade"]; // of the style sheet

/** Paper has a width of its own, and is white. */
function look(printing) {
  root.classList.toggle("printing", printing);
  const style = getComputedStyle(root);
  const colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  change({ printing, dark: scheme.matches && !printing, colours });
}

look(false);
show(drawHeads, drawControls, drawSelection, drawMixing, drawDifference, drawSteps);
show(drawPlay, drawPoint, drawMap, drawMapLegend, drawQuality, drawMovement);
show(buildWords, drawWords, drawPointed, drawTextLegend, drawSources);
scheme.addEventListener("change", () => look(state.printing));
addEventListener("beforeprint", () => look(true));
addEventListener("afterprint", () => {
  look(false);
  for (const id of ["map-chart", "mixing-chart", "steps-chart"]) Plotly.Plots.resize(byId(id));
});
root.dataset.ready = "yes";
