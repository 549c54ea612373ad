// Two runs' pages beside each other: what is chosen in one is chosen in the other, and one slider moves both.

"use strict";

const PAUSE = 250; // milliseconds; a browser takes so many changes of an address and no more
const TOLD = 2000;
// What is said of a run that lacks what the other shows, by the key of what is chosen.
const CALLED = {
  checkpoint: "model",
  layer: "layer",
  point: "capture point",
  method: "ratio",
  matrix: "measure",
  head: "head",
  layout: "layout",
};
const byId = (id) => document.getElementById(id);
const frames = [...document.querySelectorAll("iframe")];
const names = frames.map((frame) => frame.title);
const abouts = []; // of each run, once its page is there
const shown = []; // what each page shows, as `wanted`
let wanted = new URLSearchParams();
let part = null; // of the pages, where their readers are
let sites = [];
let timer = null;

const tell = (number, said) => frames[number].contentWindow.postMessage(String(said), "*");
const other = (number) => 1 - number;
const isolated = (text) => `\u2068${text}\u2069`;

/** The capture points of both runs in forward order: the longer list, and what it lacks by layer. */
function sitesOfBoth() {
  const [longer, shorter] = abouts.map((each) => each.sites).toSorted((a, b) => b.length - a.length);
  const more = shorter.filter(({ name }) => !longer.some((each) => each.name === name));
  return more.length > 0 ? [...longer, ...more].toSorted((a, b) => a.layer - b.layer) : longer;
}

/** What is wanted in words, for a run that has no such thing. */
function lackOf(key) {
  if (key === "point") return sites.find(({ name }) => name === wanted.get(key))?.label ?? wanted.get(key);
  return key === "head" && wanted.get(key) !== "mean" ? Number(wanted.get(key)) + 1 : wanted.get(key);
}

/** What a run lacks of what is wanted, or has otherwise. */
function lacksOf(number) {
  const now = shown[number];
  const text = wanted.get("document");
  const lacks = Object.keys(CALLED)
    .filter((key) => now.get(key) !== wanted.get(key))
    .filter((key, _, all) => key !== "point" || !all.includes("layer"))
    .map((key) => `no ${CALLED[key]} ${isolated(lackOf(key))}`);
  if (now.get("document") !== text) lacks.unshift(`no text ${isolated(text)}: it shows ${now.get("document")}`);
  else if (number === 1 && abouts[0].texts[text] !== abouts[1].texts[text]) {
    lacks.unshift(`another text as ${isolated(text)}`);
  } else if (wanted.get("token") !== "none" && now.get("token") === "none") {
    lacks.push(`no token ${isolated(wanted.get("tokenWord"))} in this text`);
  }
  return lacks;
}

function draw() {
  const at = sites.findIndex(({ name }) => name === wanted.get("point"));
  const { label } = sites[at] ?? { label: "" };
  byId("both-point").value = at;
  byId("both-point").setAttribute("aria-valuetext", label);
  byId("both-name").textContent = `${label} (${at + 1} of ${sites.length})`;
  const said = [0, 1].flatMap((number) => {
    const lacks = lacksOf(number);
    return lacks.length > 0 ? [`${isolated(names[number])} has ${lacks.join(", ")}.`] : [];
  });
  byId("lacks").textContent = said.join(" ");
  byId("lacks").hidden = said.length === 0;
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", `#${link()}`), PAUSE);
}

const link = () => new URLSearchParams([...wanted, ...(part ?? [])]).toString();

/** What somebody chose on a page: of all that it shows, what has changed. */
function choose(number, now) {
  const keys = new Set([...now.keys(), ...shown[number].keys()]);
  const changed = [...keys].filter((key) => now.get(key) !== shown[number].get(key));
  shown[number] = now;
  if (changed.length === 0) return;
  for (const key of changed) {
    if (now.has(key)) wanted.set(key, now.get(key));
    else wanted.delete(key);
  }
  tell(other(number), wanted);
  draw();
}

/** When both pages are there, they show what the address says, or the second what the first does. */
function begin() {
  sites = sitesOfBoth();
  byId("both-point").max = sites.length - 1;
  byId("both-point").disabled = false;
  wanted = new URLSearchParams(shown[0]);
  readLink();
  document.documentElement.dataset.drawn = "yes";
}

function readLink() {
  for (const [key, said] of new URLSearchParams(location.hash.slice(1))) {
    if (key === "part" || key === "share") (part ??= new URLSearchParams()).set(key, said);
    else if (wanted.has(key) || /^(token|source)(Word|Share)$/.test(key)) wanted.set(key, said);
  }
  for (const number of [0, 1]) {
    tell(number, wanted);
    if (part) tell(number, part);
  }
}

const HEARD = {
  about: (number, { sites: own, texts }) => {
    const known = own.map(({ name, label, layer }) => ({ name: String(name), label: String(label), layer: +layer }));
    abouts[number] = { sites: known, texts: { ...texts } };
    if (abouts[0] && abouts[1]) begin();
  },
  chosen: (number, said) => {
    const now = new URLSearchParams(String(said));
    if (abouts[0] && abouts[1]) choose(number, now);
    else shown[number] = now;
  },
  followed: (number, said) => {
    shown[number] = new URLSearchParams(String(said));
    draw();
  },
  part: (number, said) => {
    if (!(abouts[0] && abouts[1])) return;
    part = new URLSearchParams(String(said));
    tell(other(number), part);
    draw();
  },
};

addEventListener("message", ({ source, data: message }) => {
  const number = frames.findIndex(({ contentWindow }) => contentWindow === source);
  if (number < 0) return;
  for (const [kind, said] of Object.entries(message)) HEARD[kind](number, said);
});

byId("both-point").addEventListener("input", ({ target }) => {
  const { name, layer } = sites[target.value];
  wanted.set("point", name);
  if (layer > 0) wanted.set("layer", layer);
  for (const number of [0, 1]) tell(number, wanted);
});

byId("copy").addEventListener("click", async () => {
  const copied = await navigator.clipboard.writeText(`${location.href.split("#")[0]}#${link()}`).then(
    () => true,
    () => false,
  );
  byId("copy").textContent = copied ? "Copied" : "Copy the address";
  setTimeout(() => (byId("copy").textContent = "Copy link"), TOLD);
});
addEventListener("hashchange", readLink);

async function unpacked(text) {
  const packed = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

frames.forEach(async (frame, number) => {
  frame.srcdoc = await unpacked(byId(`page-${number}`).textContent.trim());
});
