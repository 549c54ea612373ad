// In the card of a token: its nearest in the full space, at the capture point of the map.

import { data, documentOf, nearestTo, nameOf, placesOf, positionOf } from "./data.js";
import { byId, element, inText } from "./elements.js";
import { state } from "./state.js";
import { lookedAt } from "./words.js";

/** How many tokens lie nearer on the map than one of the nearest in the full space does. */
function nearerOnMap(token, other) {
  const [x, y] = placesOf(state.layout, state.point);
  const from = (each) => (x[each] - x[token]) ** 2 + (y[each] - y[token]) ** 2;
  const far = from(other);
  return Number.isNaN(far) ? null : x.reduce((count, _, each) => count + (each !== token && from(each) < far), 0);
}

function listedNear(token, other) {
  const text = documentOf[other] === documentOf[token] ? "" : ` of ${data.documents[documentOf[other]].name}`;
  const where = element("small", {}, ` ${positionOf(other)}${text}`);
  const rank = nearerOnMap(token, other);
  const onMap = rank === null ? "" : `no. ${rank + 1} on the map`;
  const name = element("span", {}, element("bdi", {}, nameOf(other)), where);
  return element("li", { "data-token": other }, name, element("span", {}, onMap));
}

export function drawNearest() {
  const token = lookedAt();
  const near = token === null ? [] : nearestTo(token, state.point);
  const site = data.sites[state.point].label;
  const title = element("h3", {}, "Nearest in the full space");
  const note = `At the map's point, ${inText(site)}; the nearest first, and which of its neighbours each is on the map.`;
  const list = element("ol", {}, ...near.map((other) => listedNear(token, other)));
  byId("card-nearest").replaceChildren(
    ...(near.length > 0 ? [title, list, element("p", { class: "small" }, note)] : []),
  );
}
