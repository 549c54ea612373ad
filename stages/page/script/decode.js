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

/** Charts read a few tags in their labels. */
export const forChart = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
