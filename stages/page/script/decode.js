// What `arrays.py` packed: deflated JSON, and in it arrays of unsigned integers as base64.

export const UNKNOWN = 65535; // the code of a value that is not there
const LARGEST = 65534; // the code of the upper limit of a quantised value

export async function unpacked(text) {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

export function bytes(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) found[i] = raw.charCodeAt(i);
  return found;
}

export const codes = (text) => new Uint16Array(bytes(text).buffer);
export const value = (code, low, high) => (code === UNKNOWN ? null : low + (code * (high - low)) / LARGEST);

// Control characters, signs that turn the direction of writing, and surrogates that are no part of a pair.
const UNSEEN = /[\p{Cc}\p{Bidi_Control}\p{Cs}]/gu;

/** Tokens are anyone's text; characters that a page drops or obeys are spelt out. */
export function visible(text) {
  return text.replace(UNSEEN, (char) => {
    const code = char.charCodeAt(0);
    const name = code.toString(16).toUpperCase().padStart(4, "0");
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨U+${name}⟩`;
  });
}

/** Charts read a few tags in their labels. */
export const forChart = (text) => visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
