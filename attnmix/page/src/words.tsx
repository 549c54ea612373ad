// Words of a text: shaded, found, selected, and marked by what they gave and took.

import { computed, signal } from "@preact/signals";
import { data, documentOf, type Maybe, positionOf, range, readingAt, type Share, tokensOf } from "./data";
import { exchanged, hasSign, shadeOf, shadeRange, shadeText, ofClass } from "./measures";
import { dark, hovered, set, state } from "./state";

const THICKEST = 6; // pixels, of the line at the word that gave or took most

export const nameThere = (token: number) => readingAt(state.layer.value).names[token];
export const limits = computed(shadeRange);
export const opacity = () => (dark.value ? 0.5 : 0.68); // of the darkest shade, on which a word can still be read

function shade(value: Maybe): string | undefined {
  const [low, high] = limits.value;
  if (value === null || high <= low) return undefined;
  const share = Math.min(Math.max(hasSign() ? Math.abs(value) / high : (value - low) / (high - low), 0), 1);
  return `rgb(var(--${value < 0 ? "less" : "more"}) / ${(opacity() * share).toFixed(3)})`;
}

// Search. It looks in the text as it reads, so that a phrase or a word of several tokens is found.

export const sought = signal("");
const joined = computed(() => {
  const { words, apart } = data.readings[0];
  let text = "";
  const tokenAt: number[] = [];
  for (const token of tokensOf(state.document.value)) {
    if (text && apart[token]) text += " ";
    text += words[token].toLowerCase();
    while (tokenAt.length < text.length) tokenAt.push(token);
  }
  return { text, tokenAt };
});
/** The tokens of each place that is found. */
export const found = computed(() => {
  const query = sought.value.trim().toLowerCase().replaceAll(/\s+/g, " ");
  const { text, tokenAt } = joined.value;
  const places: number[][] = [];
  if (!query) return places;
  for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + query.length))
    places.push([...new Set(tokenAt.slice(at, at + query.length))]);
  return places;
});
const foundTokens = computed(() => new Set(found.value.flat()));

export function Find() {
  const next = () => {
    const starts = found.value.map(([first]) => first);
    if (starts.length === 0) return;
    set({ token: starts.find((each) => each > (state.token.value ?? -1)) ?? starts[0] });
  };
  const number = found.value.length;
  return (
    <label>
      <span>Find</span>
      <input
        id="find"
        type="search"
        autocomplete="off"
        placeholder="word or phrase"
        value={sought.value}
        onInput={(e) => (sought.value = e.currentTarget.value)}
        onKeyDown={(e) => e.key === "Enter" && next()}
      />
      <span class="small" aria-live="polite">
        {sought.value.trim() && `${number} found`}
      </span>
    </label>
  );
}

/** An element and no component: of 512 words, components would take longer than what they draw. */
function wordOf(props: {
  token: number;
  value: Maybe;
  id?: string;
  mark?: { took?: number; gave?: number };
  select: boolean;
}) {
  const { token, value, mark } = props;
  const { words, apart } = data.readings.length > 1 ? readingAt(state.layer.value) : data.readings[0];
  const chosen = token === state.token.value;
  const classes = [
    !apart[token] && "piece",
    foundTokens.value.has(token) && "found",
    mark?.took && "took",
    mark?.gave && "gave",
  ];
  const style: Record<string, string> = {};
  const background = shade(value);
  if (background) style.backgroundColor = background;
  if (mark?.took) style["--took-width"] = `${mark.took}px`;
  if (mark?.gave) style["--gave-width"] = `${mark.gave}px`;
  const said =
    value === null
      ? ""
      : `, ${ofClass() ? "effect" : state.shade.value === "ratio" ? "mixing ratio" : "from others"} ${shadeText(value)}`;
  return (
    <span
      id={props.id}
      role={props.select ? "option" : undefined}
      aria-selected={props.select ? chosen : undefined}
      class={classes.filter(Boolean).join(" ") + (chosen ? " chosen" : "")}
      style={style}
      data-token={token}
      data-share={value === null ? "" : shadeText(value)}
      title={`${nameThere(token)}, position ${positionOf(token)}${said}`}
    >
      {words[token]}
    </span>
  );
}

const widths = (shares: Share[]) => {
  const most = Math.max(...shares.map(({ share }) => Math.abs(share)));
  return new Map(
    shares.map(({ token, share }) => [token, Math.max(1, Math.round(THICKEST * Math.sqrt(Math.abs(share) / most)))]),
  );
};

/** Words from one token to another; with a `prefix` for their ids they can be selected by mouse and keys. */
export function Words(props: {
  tokens: number[];
  prefix?: string;
  label: string;
  checkpoint: string;
  change: boolean;
  marks?: boolean;
  id: string;
}) {
  const { tokens, prefix, checkpoint, change } = props;
  const exchange = props.marks && state.token.value !== null ? exchanged(state.token.value, checkpoint, change) : null;
  const [took, gave] = [widths(exchange?.took ?? []), widths(exchange?.gave ?? [])];
  const { apart } = readingAt(state.layer.value);
  const chosen = state.token.value;
  const { direction } = data.documents[documentOf[tokens[0]]];
  const step = (e: KeyboardEvent) => {
    const at = chosen === null ? -1 : tokens.indexOf(chosen);
    const [on, back] = [at + 1, Math.max(at - 1, 0)];
    const [left, right] = direction === "rtl" ? [on, back] : [back, on];
    const last = tokens.length - 1;
    const moves: Record<string, number> = {
      ArrowRight: right,
      ArrowDown: on,
      ArrowLeft: left,
      ArrowUp: back,
      Home: 0,
      End: last,
    };
    if (e.key === "Escape") set({ token: null });
    else if (e.key in moves) set({ token: tokens[Math.min(moves[e.key], tokens.length - 1)] });
    else return;
    e.preventDefault();
  };
  const tokenAt = (e: Event) => {
    const element = (e.target as Element).closest<HTMLElement>("[data-token]");
    return element ? Number(element.dataset.token) : null;
  };
  return (
    <div
      id={props.id}
      class="words"
      dir={direction as "ltr"}
      role={prefix ? "listbox" : "group"}
      tabIndex={0}
      aria-label={props.label}
      aria-orientation={prefix ? "horizontal" : undefined}
      aria-activedescendant={prefix && chosen !== null && tokens.includes(chosen) ? `${prefix}${chosen}` : undefined}
      onKeyDown={step}
      onClick={(e) => tokenAt(e) !== null && set({ token: tokenAt(e) })}
      onMouseOver={(e) => (hovered.value = tokenAt(e))}
      onMouseLeave={() => (hovered.value = null)}
    >
      {tokens.map((token) => (
        <>
          {token > tokens[0] && apart[token] ? " " : ""}
          {wordOf({
            token,
            value: shadeOf(token, checkpoint, change),
            id: prefix && `${prefix}${token}`,
            mark: { took: took.get(token), gave: gave.get(token) },
            select: Boolean(prefix),
          })}
        </>
      ))}
    </div>
  );
}

/** The sentence around the selected word, or the text's first; a short text is whole. */
export const sentence = computed(() => {
  const tokens = tokensOf(state.document.value);
  const { words } = data.readings[0];
  const ends = tokens.filter((token) => /^[.!?…。।]+$/.test(words[token]));
  const at = state.token.value ?? tokens[0];
  const start = (ends.findLast((end) => end < at) ?? tokens[0] - 1) + 1;
  const end = ends.find((each) => each >= at) ?? tokens.at(-1)!;
  const from = Math.max(start, at - 30); // of a text without full stops, a part
  return range(Math.min(end, from + 60) + 1, from);
});
