// Opens the modules of the page in Node, with the data of a page and a minimal simulated browser.

import { deflateSync } from "node:zlib";
import type { Payload } from "../../attnmix/page/src/payload";

export type Page = typeof import("./modules");
/** An open page, with its history of addresses. */
export type OpenPage = Page & { addresses: string[]; root: { dataset: Record<string, string> } };

let opened = 0;

/** Load the modules with data, at an address such as `#layer=2`, in a dark or light window. */
export async function openPage(data: Payload, heads: unknown = {}, hash = "", dark = false): Promise<OpenPage> {
  const elements: Record<string, object> = {
    data: { textContent: deflateSync(JSON.stringify(data)).toString("base64") },
    "head-parts": { textContent: JSON.stringify(heads) },
    app: { clientWidth: 900 },
    "grid-canvas": {},
  };
  const addresses: string[] = [];
  const root = { dataset: {} };
  const createElement = () => ({ getContext: () => ({}) });
  const go = (_state: null, _title: string, address: string) => addresses.push(address);
  Object.assign(globalThis, {
    window: globalThis,
    document: { getElementById: (id: string) => elements[id], documentElement: root, createElement },
    location: { hash, href: `file:///page.html${hash}`, protocol: "file:" },
    history: { pushState: go, replaceState: go },
    matchMedia: (query: string) => ({ matches: dark && query.includes("dark"), addEventListener() {} }),
    addEventListener() {},
    getComputedStyle: () => ({ getPropertyValue: (name: string) => name }),
    innerHeight: 800,
  });
  // Node 20 lacks `Map.groupBy`, which browsers support since 2024.
  Map.groupBy ??= <K, T>(items: Iterable<T>, keyOf: (item: T, index: number) => K) => {
    const groups = new Map<K, T[]>();
    for (const [n, item] of [...items].entries())
      groups.set(keyOf(item, n), [...(groups.get(keyOf(item, n)) ?? []), item]);
    return groups;
  };
  const address = `./modules.js?${opened++}`;
  const modules: Page = await import(address);
  return { ...modules, addresses, root };
}

type Node = { type: unknown; props: Record<string, any> };

/** True for a glossary term, which has hooks; its visible content are its children. */
const isTerm = (type: unknown) => typeof type === "function" && type.name === "Term";

/** The elements of a kind in the output of a component without hooks. */
export function elementsOf(node: unknown, kind: string): Node["props"][] {
  if (Array.isArray(node)) return node.flatMap((each) => elementsOf(each, kind));
  if (node === null || typeof node !== "object") return [];
  const { type, props } = node as Node;
  if (typeof type === "function" && !isTerm(type)) return elementsOf(type(props), kind);
  return [...(type === kind ? [props] : []), ...elementsOf(props.children, kind)];
}

/** The text in the output of a component without hooks. */
export function textOf(node: unknown): string {
  if (Array.isArray(node)) return node.map(textOf).join("");
  if (node === null || node === undefined || typeof node === "boolean") return "";
  if (typeof node !== "object") return String(node);
  const { type, props } = node as Node;
  return textOf(typeof type === "function" && !isTerm(type) ? type(props) : props.children);
}
