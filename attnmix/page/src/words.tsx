// The tokens of a text, with colours, search, selection, and marks of sources and targets.

import { computed, signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { shade } from "./colours";
import { data, documentOf, isRead, positionOf, readingAt, type Share, tokensOf } from "./data";
import { exchanged, placeOn, sourcesName, wordKind, wordRange, wordText, wordValue } from "./measures";
import { hovered, matrix, set, state } from "./state";
import { ARROWS, Term } from "./ui";

const THICKEST = 6; // pixels, line of the token with the largest share

/**
 * A token's name. It depends on the layer only in encoder-decoder models, so that views of other models need not be
 * rendered again after a change of the layer.
 */
export const nameOf =
  data.readings.length === 1
    ? (token: number) => data.readings[0].names[token]
    : (token: number) => readingAt(state.layer.value).names[token];
/** A token's name, with its position if other tokens of the text have the same name. */
export function nameInText(token: number): string {
  const name = nameOf(token);
  const isOnly = tokensOf(documentOf[token]).every((each) => each === token || nameOf(each) !== name);
  return isOnly ? name : `${name} (${positionOf(token)})`;
}
// Search. It searches the joined tokens, so that phrases and words of several tokens are found.

const sought = signal("");
/** The tokens of each match. */
const found = computed(() => {
  const query = sought.value.trim().toLowerCase().replaceAll(/\s+/g, " ");
  if (!query) return [];
  const { words, apart } = data.readings[0];
  let text = "";
  const tokenAt: number[] = []; // token of each character
  for (const token of tokensOf(state.document.value)) {
    text += (text && apart[token] ? " " : "") + words[token].toLowerCase();
    while (tokenAt.length < text.length) tokenAt.push(token);
  }
  const places: Set<number>[] = [];
  for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + query.length))
    places.push(new Set(tokenAt.slice(at, at + query.length)));
  return places;
});

export function Find() {
  const next = () => {
    const starts = found.value.map(([first]) => first);
    if (starts.length > 0) set({ token: starts.find((each) => each > (state.token.value ?? -1)) ?? starts[0] });
  };
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
        {sought.value.trim() && `${found.value.length} found`}
      </span>
    </label>
  );
}

/** The measure of the shown sources, with its explanation. */
export const SourcesName = () => (
  <Term name={matrix.value === "parts" ? "exact parts" : "share"} withoutNote>
    {sourcesName()}
  </Term>
);

/** The thickness of the line of each token. */
const widths = (shares: Share[] = []) => {
  const most = Math.max(...shares.map(({ share }) => Math.abs(share)));
  const width = (share: number) => Math.max(1, Math.round(THICKEST * Math.sqrt(Math.abs(share) / most)));
  return new Map(shares.map(({ token, share }) => [token, `${width(share)}px`]));
};

/** Tokens as running text, which can be selected by mouse and keys; `prefix` starts the IDs of their elements. */
export function Tokens(props: { id: string; tokens: number[]; prefix: string; label: string; marks?: boolean }) {
  const { id, tokens, prefix, label, marks } = props;
  const chosen = state.token.value;
  const exchange = marks && chosen !== null ? exchanged(chosen) : null;
  const [took, gave] = [widths(exchange?.took), widths(exchange?.gave)];
  const matches = new Set(found.value.flatMap((place) => [...place]));
  const { words, apart } = readingAt(state.layer.value);
  const { direction } = data.documents[documentOf[tokens[0]]];
  const selectByKey = (e: KeyboardEvent) => {
    const [x, y] = ARROWS[e.key] ?? [0, 0];
    const last = tokens.length - 1;
    const to = tokens.indexOf(chosen ?? -1) + (direction === "rtl" ? -x : x) + y;
    if (e.key === "Escape") set({ token: null });
    else if (e.key === "Home" || e.key === "End") set({ token: tokens[e.key === "Home" ? 0 : last] });
    else if (x || y) set({ token: tokens[Math.min(Math.max(to, 0), last)] });
    else return;
    e.preventDefault();
  };
  const tokenAt = (e: Event) => {
    const element = (e.target as Element).closest<HTMLElement>("[data-token]");
    return element ? Number(element.dataset.token) : null;
  };
  return (
    <div
      id={id}
      class="words"
      dir={direction as "ltr"}
      role="listbox"
      tabIndex={0}
      aria-label={label}
      aria-orientation="horizontal"
      aria-activedescendant={chosen !== null && tokens.includes(chosen) ? `${prefix}${chosen}` : undefined}
      onKeyDown={selectByKey}
      onClick={(e) => tokenAt(e) !== null && set({ token: tokenAt(e) })}
      onMouseOver={(e) => (hovered.value = tokenAt(e))}
      onMouseLeave={() => (hovered.value = null)}
    >
      {/* Plain elements, because the overhead of 512 components would exceed the time to draw them. */}
      {tokens.map((token) => {
        const value = wordValue(token);
        const said = value === null ? "" : wordText(value);
        const classes = { piece: !apart[token], found: matches.has(token), chosen: token === chosen };
        const exchanges = { took: took.has(token), gave: gave.has(token) };
        const names = Object.entries({ ...classes, ...exchanges }).filter(([, is]) => is);
        const looks = value === null ? null : shade(placeOn(wordRange.value, value));
        const style = { "--took-width": took.get(token), "--gave-width": gave.get(token) };
        return (
          <>
            {token > tokens[0] && apart[token] ? " " : ""}
            <span
              id={`${prefix}${token}`}
              role="option"
              aria-selected={token === chosen}
              class={names.map(([name]) => name).join(" ")}
              style={{ ...style, backgroundColor: looks?.colour, color: looks?.ink }}
              data-token={token}
              data-share={said}
              title={`${nameOf(token)}, position ${positionOf(token)}${isRead(token) ? ", read by the classifier" : ""}${said && `, ${wordKind()} ${said}`}`}
            >
              {words[token]}
            </span>
          </>
        );
      })}
    </div>
  );
}

/** A token in a list, selected by a click. */
export const TokenLink = ({ token, name, children }: { token: number; name: string; children?: ComponentChildren }) => (
  <button data-token={token} onClick={() => set({ token })}>
    <bdi>{name}</bdi>{" "}
    <small>
      {positionOf(token)}
      {children}
    </small>
  </button>
);
