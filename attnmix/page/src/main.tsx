// The page: the bar of choices, the main result with the picture of a text, and the other views.

import { render } from "preact";
import { headCount } from "./attention";
import { Answer, Layers, More } from "./curves";
import { checkpoints, data, layerCount } from "./data";
import { Heads } from "./heads";
import { MapPane } from "./map";
import { drawFirstScreen, drawRest, drawWhole, Later, nextFrame, report } from "./parts";
import { canChange, followAddress, position, printing, set, showAtOnce, state } from "./state";
import { Text } from "./text";
import { Select, Slider } from "./ui";
import { nameOf } from "./words";

const texts = data.documents.map(({ heading }) => heading);

const Bar = () => (
  <div id="bar" role="region" aria-label="What is shown">
    {texts.length > 1 && <Select choice="document" label="Text" names={texts} options={[...texts.keys()]} />}
    {canChange && (
      <span id="checkpoint" role="group" aria-label="Model">
        {checkpoints.map((each) => (
          <button value={each} aria-pressed={state.checkpoint.value === each} onClick={() => set({ checkpoint: each })}>
            {data.labels.checkpoints[each]}
          </button>
        ))}
      </span>
    )}
    <Slider choice="layer" class="depth" label={data.labels.layers[state.layer.value]} between={[1, layerCount]}>
      Layer <b>{data.encoder === null ? state.layer.value : data.labels.layers[state.layer.value]}</b>
    </Slider>
    <span id="selected" aria-live="polite">
      {state.token.value === null ? (
        <span class="small noprint">no token selected</span>
      ) : (
        <>
          <small class="long">Token</small>{" "}
          <span class="word">
            “
            <b>
              <bdi>{nameOf(state.token.value)}</bdi>
            </b>
            ”
          </span>{" "}
          <small title="Positions start at 0.">
            <span class="long">position </span>
            {position}
          </small>{" "}
          <button id="clear" onClick={() => set({ token: null })}>
            Clear
          </button>
        </>
      )}
    </span>
  </div>
);

const Page = () => (
  <>
    <Bar />
    <Answer />
    <section id="inside" aria-labelledby="inside-title">
      <h2 id="inside-title">Text{headCount > 0 && " and heads"}</h2>
      <Later part={0} view={Text} />
      {headCount > 0 && <Later part={1} view={Heads} />}
    </section>
    <Later part={2} view={Layers} />
    <Later part={3} view={MapPane} />
    <Later part={4} view={More} />
  </>
);

/** Draw all parts, and return the element with an ID, unfolded if necessary; null if there is none. */
function uncover(id: string): HTMLElement | null {
  drawWhole();
  const target = document.getElementById(id);
  if (target instanceof HTMLDetailsElement) target.open = true;
  return target;
}

followAddress();
const app = document.getElementById("app")!;
app.replaceChildren(); // remove the static picture
render(<Page />, app);
drawFirstScreen();
addEventListener("click", ({ target }) => {
  const link = target instanceof Element && target.closest<HTMLAnchorElement>('a[href^="#"]');
  if (link) uncover(link.hash.slice(1));
});
const root = document.documentElement;
addEventListener("beforeprint", () => {
  drawWhole();
  root.classList.add("paper");
  showAtOnce(() => (printing.value = true));
  document.getElementById("printed")!.textContent = `Printed ${new Date().toISOString().slice(0, 10)}.`;
  for (const each of document.querySelectorAll<HTMLDetailsElement>("details.run")) each.open = true;
});
addEventListener("afterprint", () => {
  root.classList.remove("paper");
  printing.value = false;
});
// A hash with "=" contains choices rather than the ID of an element.
if (location.hash && !location.hash.includes("=")) uncover(location.hash.slice(1))?.scrollIntoView();

await nextFrame();
report("ready");
await drawRest();
report("whole");
