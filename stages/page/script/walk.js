// Through the model: the slider over the capture points, and Play.

import { data } from "./data.js";
import { byId } from "./elements.js";
import { change, state } from "./state.js";

const last = data.sites.length - 1;
byId("point").max = last;
byId("point").addEventListener("input", ({ target }) => change({ point: Number(target.value) }));

function pause() {
  clearInterval(state.timer);
  change({ timer: null });
}

function forward() {
  if (state.point === last) pause();
  else change({ point: state.point + 1 });
}

byId("play").addEventListener("click", () => {
  if (state.timer !== null) pause();
  else change({ point: state.point % last, timer: setInterval(forward, 1000 / data.framesPerSecond) });
});

export function drawPoint() {
  const { label } = data.sites[state.point];
  byId("point").value = state.point;
  byId("point").setAttribute("aria-valuetext", label);
  byId("point-name").textContent = `${label} (${state.point + 1} of ${data.sites.length})`;
}

export function drawPlay() {
  const playing = state.timer !== null;
  byId("play").textContent = playing ? "Pause" : "Play";
  byId("play").classList.toggle("playing", playing);
  // Several names a second are too many to be read out.
  byId("point-name").setAttribute("aria-live", playing ? "off" : "polite");
}
