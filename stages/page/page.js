"use strict";
// The views share one state; every change of it draws the views that show it.

const UNKNOWN = 65535, LARGEST = 65534;
const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
// Okabe and Ito's colours, which people with any common colour blindness tell apart.
const KINDS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#B8A600"];
const SYMBOLS = ["triangle-down", "square", "pentagon", "triangle-up", "x", "circle", "hexagon"];
const FONT = "system-ui, DejaVu Sans, sans-serif", WORD_SIZE = 11, MAP_MARGIN = 8; // pixels
const MEASURES = [
  ["trustworthiness", "trustworthiness"], ["continuity", "continuity"], ["neighbours_kept", "neighbours kept"],
  ["distance_spearman", "rank correlation of distances"], ["neighbour_overlap", "neighbours the same with other seeds"],
  ["procrustes_distance", "Procrustes distance to other seeds"],
];

const byId = (id) => document.getElementById(id);
const element = (name, text, attributes = {}) => {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const PRINTED = { width: 640, height: 400, tall: 480 }; // pixels, as in the style sheet
// A finger scrolls the page; what it would drag or zoom stays as it is.
const COARSE = matchMedia("(pointer: coarse)").matches;
const inText = (label) => label[0].toLowerCase() + label.slice(1);
const percent = (share) => (share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`);

// Tokens are anyone's text. They reach the page as text only; signs that a page drops or obeys are spelt out.
function visible(text) {
  return text.replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]/g, (c, at, all) => {
      const code = c.charCodeAt(0);
      const before = all.charCodeAt(at - 1), after = all.charCodeAt(at + 1);
      const pair = (code >= 0xd800 && code < 0xdc00 && after >= 0xdc00 && after < 0xe000)
        || (code >= 0xdc00 && code < 0xe000 && before >= 0xd800 && before < 0xdc00);
      return pair ? c : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
    });
}
// Charts read a few tags in their labels.
const forChart = (text) => visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function bytes(text) {
  const raw = atob(text), found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}
const words16 = (text) => new Uint16Array(bytes(text).buffer);
const value = (steps, low, high) => (steps === UNKNOWN ? null : low + (steps * (high - low)) / LARGEST);

async function unpacked() {
  const stream = new Blob([bytes(byId("data").textContent.trim())]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function start(data) {
  const state = {
    token: null, hovered: null, document: 0, point: 0, layout: null, colour: "position", shape: "points", everyone: true,
    layer: 1, checkpoint: null, method: data.method, matrix: "alti", head: "mean",
    curveCheckpoint: "both", stepMeasure: "cosine_input", stepCheckpoint: null, timer: null, printing: false,
  };
  const tokens = (data.tokens || []).map(visible);
  const documents = data.documents || [];
  const sites = data.sites || [];
  const documentOf = [];
  documents.forEach((each, number) => { for (let i = 0; i < each.length; i++) documentOf.push(number); });
  const position = (token) => token - documents[documentOf[token]].start;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const maps = {};
  for (const [name, map] of Object.entries(data.maps || {})) maps[name] = { x: words16(map.x), y: words16(map.y), ranges: map.ranges };
  const ratios = {};
  for (const [checkpoint, methods] of Object.entries((data.ratios && data.ratios.values) || {})) {
    ratios[checkpoint] = Object.fromEntries(Object.entries(methods).map(([name, text]) => [name, words16(text)]));
  }
  const tokenSteps = Object.fromEntries(Object.entries(data.tokenSteps || {}).map(([name, text]) => [name, words16(text)]));
  const checkpoints = Object.keys(data.labels.checkpoints);
  const measured = checkpoints.filter((name) => ratios[name] || Object.values(data.contributions || {}).some((each) => each[name]));
  const captured = measured.includes("finetuned") ? "finetuned" : measured[0];
  const depth = Math.max(data.ratios ? data.ratios.layers || 0 : 0, ...sites.map((site) => site.layer), 0);
  state.checkpoint = captured || null;

  const ratio = (token, layer, checkpoint = state.checkpoint, method = state.method) => {
    const found = ratios[checkpoint] && ratios[checkpoint][method];
    return found && layer >= 1 ? value(found[(layer - 1) * tokens.length + token], 0, 1) : null;
  };
  const largestRatio = {};
  function ratioLimit(checkpoint = state.checkpoint) {
    const key = `${checkpoint} ${state.method}`;
    if (!(key in largestRatio)) {
      const found = (ratios[checkpoint] || {})[state.method] || [];
      let most = 0;
      for (const steps of found) if (steps !== UNKNOWN && steps > most) most = steps;
      largestRatio[key] = most ? most / LARGEST : 1;
    }
    return largestRatio[key];
  }
  const place = (layout, point, token) => {
    const map = maps[layout], at = point * tokens.length + token;
    if (map.x[at] === UNKNOWN) return null;
    const range = layout === "separate" ? [[0, 1], [0, 1]] : map.ranges[0];
    return [value(map.x[at], ...range[0]), value(map.y[at], ...range[1])];
  };

  // Controls

  const fill = (id, pairs, chosen) => {
    const select = byId(id);
    if (!select) return;
    select.replaceChildren(...pairs.map(([key, label]) => element("option", label, { value: key })));
    if (chosen !== undefined && chosen !== null) select.value = chosen;
  };
  const listen = (id, kind, act) => { if (byId(id)) byId(id).addEventListener(kind, act); };
  const choose = (id, key, ...draw) => listen(id, "change", (event) => { state[key] = event.target.value; draw.forEach((each) => each()); });
  const named = (names, labels) => names.map((name) => [name, labels[name] || name]);

  const layoutSelect = byId("layout");
  if (layoutSelect) state.layout = layoutSelect.value;
  fill("document", documents.map((each, number) => [number, `${each.name} (${each.length} tokens)`]));
  fill("layer", Array.from({ length: depth }, (_, i) => [i + 1, `Layer ${i + 1}`]), 1);
  fill("checkpoint", named(measured, data.labels.checkpoints), state.checkpoint);
  const methods = (data.ratios && data.ratios.methods) || [];
  fill("ratio-method", named(methods, data.labels.methods), state.method);
  const curveMethods = [...new Set(data.curves.map((row) => row.method))];
  fill("curve-method", named(curveMethods, data.labels.methods), state.method);
  const inCurves = checkpoints.filter((name) => data.curves.some((row) => row.checkpoint === name));
  fill("curve-checkpoint", [...(inCurves.length > 1 ? [["both", "pretrained against fine-tuned"]] : []), ...named(inCurves, data.labels.checkpoints)]);
  if (byId("curve-checkpoint")) state.curveCheckpoint = byId("curve-checkpoint").value;
  const inSteps = checkpoints.filter((name) => data.steps.some((row) => row.checkpoint === name));
  state.stepCheckpoint = inSteps.includes("finetuned") ? "finetuned" : inSteps[0];
  fill("step-checkpoint", named(inSteps, data.labels.checkpoints), state.stepCheckpoint);

  choose("layout", "layout", drawMap);
  choose("colour", "colour", drawMap);
  choose("shape", "shape", drawMap);
  listen("everyone", "change", (event) => { state.everyone = event.target.checked; drawMap(); });
  choose("checkpoint", "checkpoint", fillMatrices, drawText, drawMap);
  listen("ratio-method", "change", (event) => setMethod(event.target.value));
  listen("curve-method", "change", (event) => setMethod(event.target.value));
  choose("matrix", "matrix", fillHeads, drawText);
  choose("head", "head", drawText);
  choose("curve-checkpoint", "curveCheckpoint", drawMixing);
  choose("step-measure", "stepMeasure", drawSteps);
  choose("step-checkpoint", "stepCheckpoint", drawSteps);
  listen("layer", "change", (event) => setLayer(Number(event.target.value)));
  listen("document", "change", (event) => {
    state.document = Number(event.target.value);
    state.token = state.hovered = null;
    buildWords(); fillMatrices(); drawAll();
  });
  listen("clear", "click", () => { select(null); byId("words").focus(); });
  listen("point", "input", (event) => setPoint(Number(event.target.value)));
  listen("play", "click", () => (state.timer ? stop() : play()));

  function setMethod(method) {
    state.method = method;
    for (const id of ["ratio-method", "curve-method"]) if (byId(id)) byId(id).value = method;
    drawText(); drawMap(); drawMixing();
  }
  function setLayer(layer) {
    state.layer = layer;
    if (byId("layer")) byId("layer").value = layer;
    drawText(); drawMixing(); drawSteps();
  }
  function setPoint(point) {
    state.point = point;
    byId("point").value = point;
    if (sites[point].layer >= 1 && sites[point].layer !== state.layer) setLayer(sites[point].layer);
    drawMap();
  }
  function play() {
    if (state.point >= sites.length - 1) setPoint(0);
    state.timer = setInterval(() => {
      if (state.point >= sites.length - 1) stop();
      else setPoint(state.point + 1);
    }, 1000 / data.framesPerSecond);
    byId("play").textContent = "Pause";
    byId("play").className = "playing";
    byId("point-name").setAttribute("aria-live", "off"); // several names a second are too many to be read out
  }
  function stop() {
    clearInterval(state.timer);
    state.timer = null;
    byId("play").textContent = "Play";
    byId("play").className = "";
    byId("point-name").setAttribute("aria-live", "polite");
  }
  function select(token) {
    state.token = token;
    if (token !== null && documentOf[token] !== state.document) {
      state.document = documentOf[token];
      byId("document").value = state.document;
      buildWords(); fillMatrices();
    }
    drawAll();
  }
  function drawAll() { drawSelection(); drawText(); drawMap(); drawMixing(); drawSteps(); }

  // The selected token

  function drawSelection() {
    const shown = byId("selected");
    if (!shown) return;
    byId("clear").hidden = state.token === null;
    if (state.token === null) {
      shown.textContent = "No token is selected: choose one in the map or the text.";
      return;
    }
    const word = element("b", null);
    word.append(element("bdi", tokens[state.token]));
    shown.replaceChildren("Selected: ", word, `, position ${position(state.token)} of ${documents[state.document].name}`);
  }

  // Charts

  const plotted = (layout) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--ink"), family: FONT, size: 13 },
    margin: { l: 56, r: 16, t: 16, b: 48 }, hoverlabel: { align: "left" }, dragmode: COARSE ? false : "zoom",
    ...(state.printing ? { width: PRINTED.width, height: PRINTED.height } : {}), ...layout,
  });
  const axis = (title, more = {}) => ({
    title: { text: title }, gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), ...more,
  });
  // By name, as plotly's own choice holds one that sends the chart to a cloud.
  const config = {
    responsive: true, displaylogo: false, displayModeBar: COARSE ? false : "hover", scrollZoom: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };
  const isDark = () => !state.printing && matchMedia("(prefers-color-scheme: dark)").matches;
  // The end of the scale that the paper would swallow is left out.
  const viridis = (share) => {
    const inside = Math.min(Math.max(share, 0), 1), kept = isDark() ? 0.2 + 0.8 * inside : 0.88 * inside;
    const at = kept * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
    const mixed = VIRIDIS[low].map((from, i) => Math.round(from + (at - low) * (VIRIDIS[low + 1][i] - from)));
    return `rgb(${mixed.join(",")})`;
  };
  const grey = () => style("--soft");

  function colourOf(token) {
    if (state.colour === "position") return viridis(position(token) / Math.max(documents[documentOf[token]].length - 1, 1));
    if (state.colour === "class") return data.classes[token] < 0 ? grey() : KINDS[data.classes[token]];
    if (state.colour === "document") {
      if (documents.length <= KINDS.length) return KINDS[documentOf[token]];
      return documentOf[token] === state.document ? KINDS[0] : grey(); // more texts than colours to tell apart
    }
    const share = ratio(token, sites[state.point].layer, "finetuned");
    return share === null ? grey() : viridis(share / ratioLimit("finetuned"));
  }
  function hoverText(token) {
    const site = sites[state.point], share = ratio(token, site.layer, "finetuned");
    const lines = [`<b>${forChart(data.tokens[token])}</b>`, `position ${position(token)} of ${forChart(documents[documentOf[token]].name)}`, site.label];
    if (share !== null) lines.push(`${data.labels.methods[state.method]}: ${percent(share)} from others`);
    return lines.join("<br>");
  }
  function ramp(low, high) {
    const bar = element("span", null, { class: "ramp" });
    bar.style.background = `linear-gradient(90deg, ${VIRIDIS.map((_, i) => viridis(i / (VIRIDIS.length - 1))).join(", ")})`;
    return [element("span", low), bar, element("span", high)];
  }
  function drawLegend() {
    const named = (name, colour) => {
      const entry = element("span", null), dot = element("i", null);
      dot.style.background = colour;
      entry.append(dot, name);
      return entry;
    };
    const legend = byId("map-legend");
    if (state.colour === "position") legend.replaceChildren(...ramp("first token", "last token"));
    else if (state.colour === "class") legend.replaceChildren(...data.classNames.map((name, i) => named(name, KINDS[i])));
    else if (state.colour === "document" && documents.length <= KINDS.length) legend.replaceChildren(...documents.map((each, i) => named(each.name, KINDS[i])));
    else if (state.colour === "document") legend.replaceChildren(named(documents[state.document].name, KINDS[0]), named("all others", grey()));
    else if (!ratios.finetuned) legend.replaceChildren("No ratios of the fine-tuned model: mixing.checkpoints leaves it out.");
    else if (sites[state.point].layer === 0) legend.replaceChildren("Before the first layer nothing is mixed yet.");
    else {
      const how = `(${inText(data.labels.methods[state.method])}, ${inText(data.labels.checkpoints.finetuned)})`;
      legend.replaceChildren(...ramp("0 % from others", percent(ratioLimit("finetuned"))), element("span", how));
    }
  }

  // Where the vectors of all points lie, thinned out, so that the shown ones have their surroundings.
  let surroundings = null;
  function everywhere() {
    if (!surroundings) {
      const all = sites.length * tokens.length, step = Math.max(1, Math.ceil(all / 2000)), x = [], y = [];
      for (let i = 0; i < all; i += step) {
        const at = place("joint", Math.floor(i / tokens.length), i % tokens.length);
        if (at) { x.push(at[0]); y.push(at[1]); }
      }
      surroundings = { x, y };
    }
    return {
      type: "scatter", mode: "markers", ...surroundings, hoverinfo: "skip", showlegend: false, name: "all points",
      marker: { size: 3, color: style("--line") },
    };
  }

  // Words where there is room, the selected one first; zooming in makes room for more.
  const pen = document.createElement("canvas").getContext("2d"), widths = new Map();
  function widthOf(token) {
    if (!widths.has(token)) {
      pen.font = `${WORD_SIZE}px ${FONT}`;
      widths.set(token, pen.measureText(tokens[token]).width);
    }
    return widths.get(token);
  }
  function roomFor(shown, x, y, chart, ranges) {
    const size = state.printing ? [PRINTED.width, PRINTED.tall] : [chart.clientWidth, chart.clientHeight];
    const [width, height] = size.map((pixels) => pixels - 2 * MAP_MARGIN);
    const scale = Math.min(width / Math.abs(ranges[0][1] - ranges[0][0]), height / Math.abs(ranges[1][1] - ranges[1][0]));
    const taken = [], fits = new Set(), order = shown.map((_, i) => i);
    const first = shown.indexOf(state.token);
    if (first > 0) order.unshift(...order.splice(first, 1));
    for (const i of order) {
      const half = widthOf(shown[i]) / 2 + 1, left = x[i] * scale - half, right = x[i] * scale + half, middle = y[i] * scale;
      if (taken.some((each) => left < each.right && each.left < right && Math.abs(middle - each.middle) < WORD_SIZE)) continue;
      taken.push({ left, right, middle });
      fits.add(i);
    }
    return fits;
  }

  function drawMap() {
    const chart = byId("map-chart");
    if (!chart) return;
    const site = sites[state.point];
    if (chart.dataset.layout !== state.layout) { // or a reset of the axes would be to those of another layout
      Plotly.purge(chart);
      delete chart.dataset.heard;
      chart.dataset.layout = state.layout;
    }
    byId("point").max = sites.length - 1;
    byId("point").setAttribute("aria-valuetext", site.label);
    byId("point-name").textContent = `${site.label} (${state.point + 1} of ${sites.length})`;
    const shown = [], x = [], y = [];
    tokens.forEach((_, token) => {
      if (!state.everyone && documentOf[token] !== state.document) return;
      const at = place(state.layout, state.point, token);
      if (at) { shown.push(token); x.push(at[0]); y.push(at[1]); }
    });
    const colours = shown.map(colourOf), size = shown.length > 800 ? 6 : 9;
    const points = {
      type: "scatter", x, y, customdata: shown.map((token) => [token, hoverText(token)]),
      hovertemplate: "%{customdata[1]}<extra></extra>", showlegend: false, name: "tokens",
    };
    const range = state.layout === "separate" ? [[-0.02, 1.02], [-0.02, 1.02]] : maps[state.layout].ranges[0];
    if (state.shape === "words") {
      // A chart keeps what its reader zoomed to until the layout changes.
      const seen = chart.layout && chart.layout.uirevision === state.layout;
      const fits = roomFor(shown, x, y, chart, seen ? [chart.layout.xaxis.range, chart.layout.yaxis.range] : range);
      // A space, as plotly never draws a text again that was once empty.
      Object.assign(points, {
        mode: "markers+text", text: shown.map((token, i) => (fits.has(i) ? forChart(data.tokens[token]) : " ")),
        textposition: "top center", textfont: { size: WORD_SIZE, color: style("--ink") }, marker: { color: colours, size: 6, line: { width: 0 } },
      });
    } else {
      Object.assign(points, { mode: "markers", marker: { color: colours, size, opacity: 0.85, line: { width: 0.6, color: style("--paper") } } });
    }
    const traces = [points];
    if (state.layout === "joint") traces.unshift(everywhere());
    if (state.token !== null) {
      const here = place(state.layout, state.point, state.token);
      if (state.layout !== "separate") {
        const way = [];
        for (let i = 0; i <= state.point; i++) { const at = place(state.layout, i, state.token); if (at) way.push([at, i]); }
        traces.unshift({
          type: "scatter", mode: "lines+markers", x: way.map((each) => each[0][0]), y: way.map((each) => each[0][1]),
          customdata: way.map((each) => sites[each[1]].label), hovertemplate: "%{customdata}<extra>trail</extra>", showlegend: false,
          line: { color: style("--mark"), width: 1.5 }, marker: { size: 5, color: style("--mark") }, opacity: 0.75, name: "trail",
        });
      }
      if (here) {
        traces.push({
          type: "scatter", mode: "markers", x: [here[0]], y: [here[1]], hoverinfo: "skip", showlegend: false, name: "selected",
          marker: { symbol: "circle-open", size: 18, color: style("--mark"), line: { width: 3 } },
        });
      }
    }
    const bare = { showticklabels: false, zeroline: false, ticks: "", showgrid: false };
    Plotly.react(chart, traces, plotted({
      ...(state.printing ? { height: PRINTED.tall } : {}), margin: { l: MAP_MARGIN, r: MAP_MARGIN, t: MAP_MARGIN, b: MAP_MARGIN }, dragmode: COARSE ? false : "pan", hovermode: "closest", uirevision: state.layout,
      xaxis: { ...bare, range: [...range[0]], constrain: "domain" }, yaxis: { ...bare, range: [...range[1]], scaleanchor: "x" },
    }), config);
    const candidates = state.everyone || !documents.length ? tokens.length : documents[state.document].length;
    const off = state.token !== null && !place(state.layout, state.point, state.token) ? " The selected token is not among them." : "";
    byId("map-note").textContent = shown.length === candidates ? "" : `${shown.length} of ${candidates} tokens are on this map (umap.max_points).${off}`;
    chart.setAttribute("aria-label", `${state.layout} map, ${site.label}: ${shown.length} tokens`);
    if (!chart.dataset.heard) {
      chart.dataset.heard = "yes";
      chart.on("plotly_click", (event) => {
        const found = event.points.find((each) => Array.isArray(each.customdata));
        if (found) select(found.customdata[0]);
      });
      chart.on("plotly_relayout", () => { if (state.shape === "words" && !state.printing) drawMap(); });
    }
    drawLegend();
    drawQuality();
  }

  function drawQuality() {
    const body = byId("quality").tBodies[0], found = (data.quality || {})[state.layout];
    const number = (pair, which) => (pair && pair[which] !== null ? pair[which].toFixed(3) : "–");
    const rows = MEASURES.filter(([name]) => found && found.whole[name]).map(([name, label]) => {
      const row = element("tr", null, { "data-measure": name }), here = found.points[state.point][name];
      row.append(element("th", label, { scope: "row" }), element("td", number(found.whole[name], 0)),
        element("td", number(here, 0)), element("td", number(found.whole[name], 1)));
      return row;
    });
    body.replaceChildren(...rows);
    // The first rows are those of the seed that is shown, the others its refits'.
    const moves = data.movement.filter((row) => row.layout === state.layout && row.layer === sites[state.point].layer);
    const against = (step, name) => moves.filter((row) => row.step === step && row.against === name);
    const step = state.method === "enc_n" ? "layer" : "attention";
    const [full] = against(step, "full_space"), [mixed] = against(step, state.method);
    const say = (row) => {
      const all = against(row.step, row.against).map((each) => each.spearman).filter((each) => each !== null);
      if (row.spearman === null) return "none (constant)";
      return row.spearman.toFixed(2) + (all.length > 1 ? ` (${Math.min(...all).toFixed(2)} to ${Math.max(...all).toFixed(2)} with ${all.length} seeds)` : "");
    };
    byId("movement").textContent = state.layout === "separate" ? "Separate maps share no plane, so there is no trail from one to the next."
      : !full ? "" : `In ${step === "layer" ? "the whole" : "the attention step"} of layer ${full.layer}, moves on this map have a rank correlation of ${say(full)} with moves in the full space`
      + (mixed ? `, and of ${say(mixed)} with the mixing ratio.` : ".");
  }

  // Text

  const matrices = () => ((data.contributions || {})[(documents[state.document] || {}).name] || {})[state.checkpoint];
  function fillMatrices() {
    const found = matrices();
    const names = found ? Object.keys(found).filter((name) => name !== "heads") : [];
    if (!names.includes(state.matrix)) state.matrix = names[0];
    fill("matrix", named(names, data.labels.matrices), state.matrix);
    fillHeads();
  }
  function fillHeads() {
    const found = matrices(), select = byId("head");
    if (!select) return;
    const heads = found && state.matrix === "attention" ? found.heads.number : 0;
    if (heads && state.head !== "mean" && Number(state.head) >= heads) state.head = "mean";
    fill("head", [["mean", heads ? "mean of the heads" : "–"], ...Array.from({ length: heads }, (_, i) => [i, `head ${i + 1}`])], heads ? state.head : "mean");
    select.disabled = !heads;
  }
  const decoded = new Map();
  function sourcesOf(token) {
    const found = matrices();
    if (!found || !state.matrix) return null;
    const byHead = state.matrix === "attention" && state.head !== "mean";
    const part = byHead ? found.heads : found[state.matrix];
    if (!decoded.has(part)) decoded.set(part, { sources: words16(part.sources), shares: bytes(part.shares) });
    const arrays = decoded.get(part), { start, length } = documents[state.document];
    const layer = byHead ? (state.layer - 1) * part.number + Number(state.head) : state.layer - 1;
    const from = (layer * length + (token - start)) * part.keep;
    if (arrays.sources[from] === UNKNOWN) return [];
    const rows = [];
    for (let i = from; i < from + part.keep; i++) {
      const share = (arrays.shares[i] / 255) ** 2;
      if (share > 0) rows.push({ token: start + arrays.sources[i], share });
    }
    return rows;
  }

  function buildWords() {
    const box = byId("words");
    if (!box || !documents.length) return;
    const { start, length, name } = documents[state.document];
    const spans = [], byteLevel = data.tokens.some((each) => each.startsWith("\u0120"));
    const glued = (next) => (byteLevel ? !next.startsWith("\u0120") : next.startsWith("##"));
    for (let token = start; token < start + length; token++) {
      const raw = data.tokens[token], piece = raw.startsWith("##") && raw.length > 2;
      const shown = piece ? tokens[token].slice(2) : tokens[token].replace(/^\u0120/, "");
      const span = element("span", shown, { role: "option", id: `token-${token}`, "aria-selected": "false" });
      if (piece) span.className = "piece";
      spans.push(span);
      if (token + 1 < start + length && !glued(data.tokens[token + 1])) spans.push(document.createTextNode(" "));
    }
    box.replaceChildren(...spans);
    box.setAttribute("aria-label", `Words of ${name}`);
  }
  function drawText() {
    const box = byId("words");
    if (!box || !documents.length) return;
    const shade = style("--shade"), most = ratioLimit();
    const looked = state.hovered === null ? state.token : state.hovered;
    const found = looked === null ? null : sourcesOf(looked);
    const took = new Map((found || []).map((each) => [each.token, each.share]));
    const mostTaken = Math.max(...took.values(), 1e-9);
    for (const span of box.querySelectorAll("span")) {
      const token = Number(span.id.slice(6)), share = ratio(token, state.layer);
      span.style.backgroundColor = share === null ? "" : `rgba(${shade}, ${(strongest() * share) / most})`;
      const taken = took.get(token);
      span.style.borderBottomColor = taken ? style("--took") : "transparent";
      span.style.borderBottomWidth = taken ? `${1 + Math.round(5 * Math.sqrt(taken / mostTaken))}px` : "4px";
      span.setAttribute("aria-selected", String(token === state.token));
      const parts = [tokens[token], `position ${position(token)}`];
      if (share !== null) parts.push(`${percent(share)} from others`);
      if (taken) parts.push(`gave ${percent(taken)} to ${tokens[looked]}`);
      span.title = parts.join(", ");
    }
    if (state.token === null) box.removeAttribute("aria-activedescendant");
    else box.setAttribute("aria-activedescendant", `token-${state.token}`);
    drawTextLegend(most);
    drawSources(found, looked);
  }
  const strongest = () => (isDark() ? 0.5 : 0.68); // opacity that words can still be read on
  function drawTextLegend(most) {
    const legend = byId("text-legend"), shade = style("--shade");
    if (!ratios[state.checkpoint]) { legend.replaceChildren(); return; }
    const bar = element("span", null, { class: "ramp" });
    bar.style.background = `linear-gradient(90deg, rgba(${shade}, 0), rgba(${shade}, ${strongest()}))`;
    legend.replaceChildren(element("span", "0 % from other words"), bar, element("span", percent(most)));
  }
  function drawSources(found, looked) {
    const box = byId("sources");
    byId("sources-title").textContent = looked === null ? "Took from" : `“${tokens[looked]}” took from`;
    if (looked === null) { box.replaceChildren(element("p", "Select a word.", { class: "small" })); return; }
    const share = ratio(looked, state.layer);
    const head = element("p", share === null ? "" : `Layer ${state.layer}: ${percent(share)} from others (${inText(data.labels.methods[state.method])}).`, { class: "small" });
    if (found === null) {
      box.replaceChildren(head, element("p", "What this text's words took from each other is not on the page, which would grow too large; it is in features/mixing/contributions.", { class: "note" }));
      return;
    }
    if (!found.length) {
      box.replaceChildren(head, element("p", "The row of this token is too small to be told from rounding, so it is not shown.", { class: "note" }));
      return;
    }
    const rollout = state.matrix.endsWith("_rollout"), ofHead = state.matrix === "attention" && state.head !== "mean" ? `, head ${Number(state.head) + 1}` : "";
    const how = element("p", `By ${data.labels.matrices[state.matrix]}${ofHead}, ${rollout ? `from the embedding to layer ${state.layer}` : `in layer ${state.layer}`}:`);
    const list = element("ol", null), most = found[0].share;
    for (const { token, share: taken } of found.slice(0, 12)) {
      const row = element("li", null, { "data-token": token }), bar = element("i", null, { "aria-hidden": "true" });
      bar.style.width = `${(100 * taken) / most}%`;
      const name = element("bdi", tokens[token]);
      row.append(bar, name, element("span", percent(taken)));
      name.append(token === looked ? " (itself)" : element("small", ` ${position(token)}`));
      list.append(row);
    }
    const shown = found.slice(0, 12).reduce((sum, each) => sum + each.share, 0);
    box.replaceChildren(head, how, list, element("p", `All others: ${percent(Math.max(0, 1 - shown))}.`, { class: "small" }));
  }
  listen("words", "click", (event) => {
    const span = event.target.closest("span");
    if (span) select(Number(span.id.slice(6)));
  });
  const hover = (token) => { if (token !== state.hovered) { state.hovered = token; drawText(); } };
  listen("words", "mouseover", (event) => {
    const span = event.target.closest("span");
    hover(span ? Number(span.id.slice(6)) : null);
  });
  listen("words", "mouseleave", () => hover(null));
  const pointAt = (row) => {
    for (const span of document.querySelectorAll("#words span.pointed")) span.classList.remove("pointed");
    if (row) byId(`token-${row.dataset.token}`).classList.add("pointed");
  };
  listen("sources", "mouseover", (event) => pointAt(event.target.closest("li")));
  listen("sources", "mouseleave", () => pointAt(null));
  listen("words", "keydown", (event) => {
    const { start, length } = documents[state.document], last = start + length - 1;
    state.hovered = null; // the keyboard leads
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    let next = null;
    if (event.key in moves) next = state.token === null ? start : Math.min(Math.max(state.token + moves[event.key], start), last);
    else if (event.key === "Home") next = start;
    else if (event.key === "End") next = last;
    else if (event.key === "Escape") { select(null); event.preventDefault(); return; }
    if (next === null) return;
    event.preventDefault();
    select(next);
    byId(`token-${next}`).scrollIntoView({ block: "nearest" });
  });

  // Mixing

  const here = (layer) => ({
    type: "line", x0: layer, x1: layer, yref: "paper", y0: 0, y1: 1, line: { color: style("--soft"), width: 1, dash: "dot" },
  });
  function band(rows, colour, name, dash, extra = {}) {
    const x = rows.map((row) => row.layer), pale = { color: colour, width: 0 };
    const area = colour.startsWith("#") ? `${colour}33` : colour;
    return [
      { type: "scatter", mode: "lines", x, y: rows.map((row) => row.ci_low), line: pale, hoverinfo: "skip", showlegend: false, legendgroup: name },
      { type: "scatter", mode: "lines", x, y: rows.map((row) => row.ci_high), line: pale, fill: "tonexty", fillcolor: area, hoverinfo: "skip", showlegend: false, legendgroup: name },
      {
        type: "scatter", mode: "lines+markers", x, y: rows.map((row) => row.mean), name, legendgroup: name, line: { color: colour, width: 2.2, dash }, marker: { size: 7 },
        customdata: rows.map((row) => [row.ci_low, row.ci_high]), ...extra,
      },
    ];
  }
  const CURVES = { pretrained: ["#E69F00", "dash"], finetuned: ["#0072B2", "solid"] };
  const CURVES_DARK = { pretrained: ["#E69F00", "dash"], finetuned: ["#56B4E9", "solid"] };

  function drawMixing() {
    const chart = byId("mixing-chart");
    if (!chart) return;
    const look = isDark() ? CURVES_DARK : CURVES;
    const traces = [];
    for (const checkpoint of inCurves) {
      if (state.curveCheckpoint !== "both" && state.curveCheckpoint !== checkpoint) continue;
      const rows = data.curves.filter((row) => row.checkpoint === checkpoint && row.method === state.method);
      traces.push(...band(rows, look[checkpoint][0], data.labels.checkpoints[checkpoint], look[checkpoint][1], {
        hovertemplate: "layer %{x}: %{y:.1%} (%{customdata[0]:.1%} to %{customdata[1]:.1%})",
      }));
      if (state.token !== null && ratios[checkpoint]) {
        traces.push({
          type: "scatter", mode: "lines+markers", x: rows.map((row) => row.layer), y: rows.map((row) => ratio(state.token, row.layer, checkpoint)),
          name: `${forChart(data.tokens[state.token])}, ${inText(data.labels.checkpoints[checkpoint])}`, line: { color: look[checkpoint][0], dash: "dot", width: 1.5 },
          marker: { symbol: "diamond-open", size: 9 }, hovertemplate: "layer %{x}: %{y:.1%}",
        });
      }
    }
    const layers = [...new Set(data.curves.map((row) => row.layer))];
    Plotly.react(chart, traces, plotted({
      hovermode: "closest", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, shapes: [here(state.layer)], margin: { l: 56, r: 16, t: 60, b: 48 },
      xaxis: axis("layer", { dtick: layers.length > 16 ? 2 : 1 }), yaxis: axis("share from other tokens", { tickformat: ".0%", rangemode: "tozero" }),
    }), config);
    const row = data.differences.find((each) => each.layer === state.layer && each.method === state.method);
    const points = (share) => `${share >= 0 ? "+" : "−"}${Math.abs(100 * share).toFixed(1)}`;
    byId("difference").textContent = row ? `Layer ${row.layer}, fine-tuned minus pretrained: ${points(row.difference)} points (95 % interval ${points(row.ci_low)} to ${points(row.ci_high)}).` : "";
    if (!chart.dataset.heard) {
      chart.dataset.heard = "yes";
      chart.on("plotly_click", (event) => setLayer(event.points[0].x));
    }
  }

  // Steps

  function drawSteps() {
    const chart = byId("steps-chart");
    if (!chart) return;
    const rows = data.steps.filter((row) => row.checkpoint === state.stepCheckpoint && row.measure === state.stepMeasure);
    const traces = [];
    for (const [number, step] of [...new Set(rows.map((row) => row.step))].entries()) {
      const colour = data.stepColors[step];
      traces.push(...band(rows.filter((row) => row.step === step), colour, data.labels.steps[step], "solid", {
        marker: { size: 8, symbol: SYMBOLS[number % SYMBOLS.length] },
        hovertemplate: "layer %{x}: %{y:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})",
      }));
      if (state.token !== null && tokenSteps[step] && state.stepMeasure === "cosine_input" && state.stepCheckpoint === "finetuned") {
        const layers = tokenSteps[step].length / tokens.length;
        traces.push({
          type: "scatter", mode: "markers", showlegend: false, legendgroup: data.labels.steps[step], name: forChart(data.tokens[state.token]),
          x: Array.from({ length: layers }, (_, i) => i + 1), y: Array.from({ length: layers }, (_, i) => value(tokenSteps[step][i * tokens.length + state.token], -1, 1)),
          marker: { symbol: "diamond-open", size: 12, color: colour, line: { width: 2 } }, hovertemplate: "layer %{x}: %{y:.3f}",
        });
      }
    }
    const label = byId("step-measure").querySelector(`[value=${state.stepMeasure}]`).textContent;
    Plotly.react(chart, traces, plotted({
      hovermode: "closest", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, shapes: [here(state.layer)], margin: { l: 56, r: 16, t: 84, b: 48 },
      xaxis: axis("layer", { dtick: depth > 16 ? 2 : 1 }), yaxis: axis(label.length > 40 ? "relative to the input" : label),
    }), config);
  }

  buildWords();
  fillMatrices();
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // Paper has a width of its own, and is white.
  const print = (on) => {
    state.printing = on;
    document.documentElement.classList.toggle("printing", on);
    drawAll();
    if (!on) for (const chart of document.querySelectorAll(".chart")) if (chart.layout) Plotly.Plots.resize(chart);
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  document.documentElement.dataset.ready = "yes";
}

unpacked().then(start).catch((error) => {
  const note = element("p", `The views cannot be shown: ${error.message}. A browser of 2023 or newer is needed.`, { class: "note missing" });
  document.querySelector("main").prepend(note);
  throw error;
});
