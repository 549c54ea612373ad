// Export of a view as a picture for papers: the layout of the browser, drawn with SVG elements in light colours.
//
// Programs other than browsers support the shapes and texts of SVG, but neither HTML within SVG (<foreignObject>) nor
// style sheets. Therefore, every box, border and line of text becomes an SVG element with colours and fonts as
// attributes. The package dom-to-svg 0.12.2 would add 96 kB to the page and export canvases in screen resolution.

import { rgb } from "d3";
import { saving, showAtOnce } from "./state";

/** A canvas that can also return its drawing as shapes in CSS pixels; otherwise, it is saved as an image. */
export type DrawnCanvas = HTMLCanvasElement & {
  shapes?: () => SVGElement;
  isWhole?: boolean; // the drawing is within the canvas, except for letters of a wider font
};
type Box = { x: number; y: number; width: number; height: number };
type Attributes = Record<string, string | number | null>;

const NAMESPACE = "http://www.w3.org/2000/svg";
const MARGIN = 12; // pixels around a picture
const PNG_SCALE = 2; // PNG pixels per CSS pixel
const MAX_PNG_SIDE = 16_000; // pixels; browsers draw nothing on a larger canvas

/** Return an SVG element without the attributes that are null. */
export function shape(name: string, attributes: Attributes = {}, ...content: (Node | string)[]): SVGElement {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) {
    const rounded = typeof value === "number" ? Number(value.toFixed(2)) : value;
    if (rounded !== null) element.setAttribute(key, String(rounded));
  }
  element.append(...content);
  return element;
}

/** Split a computed colour into an opaque colour and an opacity. */
function opaque(computed: string): { colour: string; opacity: number } {
  const mixed = /^color\(srgb (\S+) (\S+) (\S+?)(?: \/ (\S+))?\)$/.exec(computed); // format of mixed colours
  if (mixed) {
    const [red, green, blue] = mixed.slice(1, 4).map((part) => 255 * Number(part));
    return { colour: rgb(red, green, blue).formatHex(), opacity: Number(mixed[4] ?? 1) };
  }
  const { opacity, ...parts } = rgb(computed);
  return { colour: rgb(parts.r, parts.g, parts.b).formatHex(), opacity };
}

const painted = (kind: "fill" | "stroke", computed: string): Attributes => {
  const { colour, opacity } = opaque(computed);
  return { [kind]: colour, [`${kind}-opacity`]: opacity < 1 ? opacity : null };
};

const isVisible = (computed: string) => opaque(computed).opacity > 0;
const pixels = (length: string) => Number.parseFloat(length) || 0;

/** The bounding box of the drawing. */
class Extent {
  left = 0;
  top = 0;
  right = 0;
  bottom = 0;

  include({ x, y, width, height }: Box): void {
    if (width === 0 && height === 0) return;
    this.left = Math.min(this.left, x);
    this.top = Math.min(this.top, y);
    this.right = Math.max(this.right, x + width);
    this.bottom = Math.max(this.bottom, y + height);
  }
}

/** The state of a drawing: the origin of its element, its extent, clipping paths, and the current line of text. */
type Drawing = {
  origin: DOMRect;
  extent: Extent;
  clips: SVGElement[];
  clipped: boolean;
  line: { pieces: Piece[]; into: Element | null }; // current line of text, not yet drawn
};

function boxOf({ x, y, width, height }: DOMRect, { origin }: Drawing): Box {
  return { x: x - origin.x, y: y - origin.y, width, height };
}

// Boxes: background, borders, outline.

const SIDES = ["Top", "Right", "Bottom", "Left"] as const;
type Side = (typeof SIDES)[number];

const dashes = (style: string, width: number) =>
  style === "dashed" ? `${2 * width} ${1.5 * width}` : style === "dotted" ? `${width} ${width}` : null;

function borderLine(side: Side, { x, y, width, height }: Box, thickness: number): Attributes {
  const half = thickness / 2;
  if (side === "Top") return { x1: x, x2: x + width, y1: y + half, y2: y + half };
  if (side === "Bottom") return { x1: x, x2: x + width, y1: y + height - half, y2: y + height - half };
  const middle = side === "Left" ? x + half : x + width - half;
  return { x1: middle, x2: middle, y1: y, y2: y + height };
}

/** Return the frame of a box, inset by `inset` pixels (outset if negative). */
function frame(box: Box, inset: number, radius: number, stroke: Attributes): SVGElement {
  const { x, y, width, height } = box;
  const size = { width: Math.max(0, width - 2 * inset), height: Math.max(0, height - 2 * inset) };
  return shape("rect", { x: x + inset, y: y + inset, ...size, rx: radius || null, fill: "none", ...stroke });
}

function drawBackground(style: CSSStyleDeclaration, box: Box, radius: number, into: Element): void {
  if (!isVisible(style.backgroundColor)) return;
  into.append(shape("rect", { ...box, rx: radius || null, ...painted("fill", style.backgroundColor) }));
}

function drawBorders(style: CSSStyleDeclaration, box: Box, radius: number, into: Element): void {
  const borders = SIDES.map((side) => {
    const [width, kind, colour] = [
      style[`border${side}Width`],
      style[`border${side}Style`],
      style[`border${side}Color`],
    ];
    return { side, width: pixels(width), kind, colour };
  });
  const shown = borders.filter(({ width, kind, colour }) => width > 0 && kind !== "none" && isVisible(colour));
  const looks = ({ width, kind, colour }: (typeof borders)[number]) => ({
    ...painted("stroke", colour),
    "stroke-width": width,
    "stroke-dasharray": dashes(kind, width),
  });
  const [first] = shown;
  const alike = shown.every(
    ({ width, kind, colour }) => `${width} ${kind} ${colour}` === `${first.width} ${first.kind} ${first.colour}`,
  );
  if (shown.length === 4 && alike) into.append(frame(box, first.width / 2, radius, looks(first)));
  else
    for (const border of shown)
      into.append(shape("line", { ...borderLine(border.side, box, border.width), ...looks(border) }));
}

function drawOutline(style: CSSStyleDeclaration, box: Box, radius: number, into: Element, drawing: Drawing): void {
  const width = pixels(style.outlineWidth);
  if (style.outlineStyle === "none" || width === 0 || !isVisible(style.outlineColor)) return;
  const outside = pixels(style.outlineOffset) + width / 2;
  const dash = dashes(style.outlineStyle, width);
  into.append(
    frame(box, -outside, radius && radius + outside, {
      ...painted("stroke", style.outlineColor),
      "stroke-width": width,
      "stroke-dasharray": dash,
    }),
  );
  if (drawing.clipped) return;
  const reach = outside + width / 2;
  const { x, y, width: wide, height } = box;
  drawing.extent.include({ x: x - reach, y: y - reach, width: wide + 2 * reach, height: height + 2 * reach });
}

/** The smallest radius of a box's corners. */
function radiusOf(style: CSSStyleDeclaration, { width, height }: Box): number {
  const corners = [style.borderTopLeftRadius, style.borderTopRightRadius, style.borderBottomLeftRadius];
  const radii = [...corners, style.borderBottomRightRadius].map((radius) =>
    radius.endsWith("%") ? (pixels(radius) / 100) * width : pixels(radius),
  );
  return Math.min(...radii, width / 2, height / 2);
}

/** Return a group whose content is clipped to a box. */
function clippedGroup(box: Box, radius: number, drawing: Drawing): SVGElement {
  const id = `clip-${drawing.clips.length + 1}`;
  drawing.clips.push(shape("clipPath", { id }, shape("rect", { ...box, rx: radius || null })));
  return shape("g", { "clip-path": `url(#${id})` });
}

// Texts.

/**
 * The fonts of pictures on screen, on paper and in files. Most systems have one of them, and most of them have the same
 * letter widths. `system-ui` would be a different font in other programs.
 */
export const PICTURE_FONT = 'Arial, "Liberation Sans", Arimo, Helvetica, "DejaVu Sans", sans-serif';
const ruler = document.createElement("canvas").getContext("2d")!;

/** The width of a text in the font of pictures, in pixels. */
export function textWidth(text: string, size: number, bold = false): number {
  ruler.font = `${bold ? "bold " : ""}${size}px ${PICTURE_FONT}`;
  return ruler.measureText(text).width;
}

/** The fraction of a font's height above the baseline. */
function ascentOf({ fontStyle, fontWeight, fontSize, fontFamily }: CSSStyleDeclaration): number {
  ruler.font = `${fontStyle} ${fontWeight} ${fontSize} ${fontFamily}`;
  const { fontBoundingBoxAscent: above, fontBoundingBoxDescent: below } = ruler.measureText("x");
  return above / (above + below);
}

type Run = { start: number; end: number; left: number; right: number; top: number; height: number };

/** The lines of a text as laid out by the browser, without the spaces at their ends. */
function linesOf(node: Text): Run[] {
  const { data } = node;
  const range = document.createRange();
  const start = data.search(/\S/);
  if (start < 0) return [];
  range.setStart(node, start);
  range.setEnd(node, data.trimEnd().length);
  const whole = range.getClientRects();
  if (whole.length === 1) {
    const [{ left, right, top, height }] = whole;
    return [{ start, end: data.trimEnd().length, left, right, top, height }];
  }
  const runs: Run[] = [];
  let at = 0;
  for (const letter of data) {
    range.setStart(node, at);
    range.setEnd(node, at + letter.length);
    const [rectangle] = range.getClientRects();
    const last = runs.at(-1);
    at += letter.length;
    if (!letter.trim()) continue;
    const joins = rectangle?.width > 0; // combining marks have no width
    if (last && (!joins || Math.abs(last.top - rectangle.top) < rectangle.height / 2)) {
      last.end = at;
      if (!joins) continue;
      last.left = Math.min(last.left, rectangle.left);
      last.right = Math.max(last.right, rectangle.right);
    } else if (joins) {
      const { left, right, top, height } = rectangle;
      runs.push({ start: at - letter.length, end: at, left, right, top, height });
    }
  }
  return runs;
}

const ANCHORS: Record<string, string> = { right: "end", end: "end", center: "middle" };

function fontOf(style: CSSStyleDeclaration): Attributes {
  const weight = Math.round(Number(style.fontWeight) / 100) * 100; // most programs support only multiples of 100
  return {
    "font-family": style.fontFamily,
    "font-size": pixels(style.fontSize),
    "font-weight": weight,
    "font-style": style.fontStyle === "normal" ? null : style.fontStyle,
  };
}

/** A part of a line with one font and colour; positions are in pixels of the picture. */
type Piece = {
  text: string;
  left: number;
  right: number;
  baseline: number;
  size: number; // of the font
  anchor: string | undefined;
  rightToLeft: boolean;
  isSpaced: boolean; // letter spacing leaves room for wider fonts
  looks: Attributes;
};

const NARROWEST_GAP = 0.1; // in font sizes; a wider gap between two pieces is a space
const WIDEST_GAP = 1; // in font sizes, between two pieces of a sentence

const gapBetween = (one: Piece, other: Piece) => other.left - one.right;

/** True if a piece directly continues the previous piece on the same line. */
function continues(last: Piece, next: Piece): boolean {
  const gap = gapBetween(last, next);
  const isBeside = gap > -NARROWEST_GAP * last.size && gap < WIDEST_GAP * last.size;
  const isLevel = Math.abs(last.baseline - next.baseline) < last.size / 4;
  return isBeside && isLevel && !last.rightToLeft && !next.rightToLeft;
}

/** Attributes that preserve the width of a text in other fonts, in programs that support them. */
export const widthAttributes = (width: number): Attributes =>
  width > 0 ? { textLength: width, lengthAdjust: "spacingAndGlyphs" } : {};

/**
 * Draw the pieces of a line as one text.
 *
 * Its pieces then never overlap, even in programs with a different font that do not support `textLength`.
 */
function endLine({ line, extent, clipped }: Drawing): void {
  const { pieces, into } = line;
  if (pieces.length === 0 || into === null) return;
  const [first, last] = [pieces[0], pieces.at(-1)!];
  const { left, anchor, rightToLeft } = first;
  const { right } = last;
  const x = rightToLeft || anchor === "end" ? right : anchor === "middle" ? (left + right) / 2 : left;
  const attributes = {
    ...{ x, y: first.baseline, "text-anchor": anchor ?? null, direction: rightToLeft ? "rtl" : null },
    "xml:space": pieces.length > 1 ? "preserve" : null, // some programs drop spaces at the start of a tspan
    ...first.looks,
    ...widthAttributes(right - left),
    ...(first.isSpaced ? { lengthAdjust: "spacing" } : {}),
  };
  const spans = pieces.map(({ text, looks }, n) => {
    const hasSpace = n > 0 && gapBetween(pieces[n - 1], pieces[n]) > NARROWEST_GAP * pieces[n].size;
    return shape("tspan", looks, hasSpace ? ` ${text}` : text);
  });
  into.append(shape("text", attributes, ...(spans.length > 1 ? spans : [first.text])));
  for (const { left: start, right: end, baseline, size } of clipped ? [] : pieces)
    extent.include({ x: start, y: baseline - size, width: end - start, height: 1.3 * size });
  line.pieces = [];
}

/** Right-align a line of text before a picture, such as a colour bar, so that text in a wider font never covers it. */
function endBefore({ x, y, height }: Box, { line }: Drawing): void {
  const last = line.pieces.at(-1);
  if (!last || last.rightToLeft) return;
  const gap = x - last.right;
  const isLevel = last.baseline > y && last.baseline - last.size < y + height;
  if (isLevel && gap > -NARROWEST_GAP * last.size && gap < WIDEST_GAP * last.size) line.pieces[0].anchor = "end";
}

/** Add the lines of a text node to the current line of the drawing. */
function drawText(node: Text, into: Element, drawing: Drawing): void {
  const style = getComputedStyle(node.parentElement!);
  const { origin, line } = drawing;
  const rightToLeft = style.direction === "rtl";
  // The anchor preserves the alignment of a line if its width differs in another font.
  const anchor = rightToLeft ? undefined : ANCHORS[style.textAlign];
  for (const { start, end, left, right, top, height } of linesOf(node)) {
    const piece = {
      ...{ left: left - origin.x, right: right - origin.x, baseline: top - origin.y + height * ascentOf(style) },
      ...{ size: pixels(style.fontSize), anchor, rightToLeft, isSpaced: pixels(style.letterSpacing) > 0 },
      text: node.data.slice(start, end).replaceAll(/\s+/g, " "),
      looks: { ...fontOf(style), ...painted("fill", style.color) },
    };
    const last = line.pieces.at(-1);
    if (last && (line.into !== into || !continues(last, piece))) endLine(drawing);
    line.into = into;
    line.pieces.push(piece);
  }
}

// SVG elements and canvases.

const INHERITED = [
  ...["fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linecap"],
  ...["stroke-linejoin", "paint-order", "font-family", "font-size", "font-weight", "text-anchor", "visibility"],
];
const OWN: Record<string, string> = { opacity: "1", "stop-color": "rgb(0, 0, 0)", "stop-opacity": "1" };
const COLOURS = new Set(["fill", "stroke", "stop-color"]);
/** Attributes that have no use outside of the page. */
const ON_THE_PAGE = /^(class|style|role|tabindex|aria-.*|data-.*|on.*)$/;

function setStyle(copy: Element, name: string, computed: string): void {
  if (computed.startsWith("url(")) return; // keep the attribute
  if (!COLOURS.has(name) || computed === "none") return copy.setAttribute(name, computed.replaceAll("px", ""));
  const { colour, opacity } = opaque(computed);
  const transparency = name === "stop-color" ? "stop-opacity" : `${name}-opacity`;
  copy.setAttribute(name, colour);
  if (opacity < 1) copy.setAttribute(transparency, String(opacity * Number(copy.getAttribute(transparency) ?? 1)));
}

/** Copy the computed styles of an element and its children to the attributes of their copies. */
function resolveStyles(original: Element, copy: Element, outer: CSSStyleDeclaration | null): void {
  const style = getComputedStyle(original);
  for (const { name } of [...copy.attributes]) if (ON_THE_PAGE.test(name)) copy.removeAttribute(name);
  // Opacities come before colours, because a transparent colour multiplies the opacity.
  const names = INHERITED.toSorted((a, b) => Number(COLOURS.has(a)) - Number(COLOURS.has(b)));
  for (const name of names) {
    const computed = style.getPropertyValue(name);
    if (computed !== outer?.getPropertyValue(name)) setStyle(copy, name, computed);
  }
  for (const [name, initial] of Object.entries(OWN)) {
    const computed = style.getPropertyValue(name);
    if (computed !== initial) setStyle(copy, name, computed);
  }
  if (original instanceof SVGTextElement && !copy.querySelector("[x], [dx], [dy]"))
    for (const [name, each] of Object.entries(widthAttributes(original.getComputedTextLength())))
      copy.setAttribute(name, String(typeof each === "number" ? Number(each.toFixed(2)) : each));
  const copies = [...copy.children];
  for (const [n, child] of [...original.children].entries()) {
    const shown = getComputedStyle(child).display !== "none" || child instanceof SVGDefsElement;
    if (!shown || ["style", "title"].includes(child.tagName)) copies[n].remove();
    else resolveStyles(child, copies[n], style);
  }
}

/** Draw a copy of an SVG element with resolved styles. */
function drawSvg(original: SVGSVGElement, into: Element, drawing: Drawing): void {
  const copy = original.cloneNode(true) as SVGSVGElement;
  resolveStyles(original, copy, null);
  const { x, y, width } = boxOf(original.getBoundingClientRect(), drawing);
  const scale = width / (original.viewBox.baseVal?.width || original.width.baseVal.value);
  const group = shape(
    "g",
    { transform: `translate(${x} ${y})${scale === 1 ? "" : ` scale(${scale})`}` },
    ...copy.childNodes,
  );
  for (const name of INHERITED) {
    const value = copy.getAttribute(name);
    if (value !== null) group.setAttribute(name, value);
  }
  into.append(group);
  if (drawing.clipped) return;
  for (const part of original.querySelectorAll("path, line, rect, circle, text"))
    drawing.extent.include(boxOf(part.getBoundingClientRect(), drawing));
}

/** Return an image of a canvas, enlarged without smoothing so that its pixels stay sharp. */
function imageOf(canvas: HTMLCanvasElement, box: Box): SVGElement {
  const times = (size: number, cells: number) => cells * Math.max(1, Math.ceil((PNG_SCALE * size) / cells));
  const large = document.createElement("canvas");
  large.width = times(box.width, canvas.width);
  large.height = times(box.height, canvas.height);
  const context = large.getContext("2d")!;
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0, large.width, large.height);
  return shape("image", { ...box, href: large.toDataURL(), preserveAspectRatio: "none" });
}

function drawCanvas(canvas: DrawnCanvas, box: Box, into: Element, drawing: Drawing): void {
  if (canvas.width === 0 || canvas.height === 0) return;
  const inner = { x: box.x + canvas.clientLeft, y: box.y + canvas.clientTop };
  const content = { ...inner, width: canvas.clientWidth, height: canvas.clientHeight };
  if (!canvas.shapes) return into.append(imageOf(canvas, content));
  const drawn = canvas.shapes();
  drawn.setAttribute("transform", `translate(${inner.x} ${inner.y})`);
  if (canvas.isWhole) return into.append(drawn);
  const group = clippedGroup(content, 0, drawing);
  group.append(drawn);
  into.append(group);
}

const FLOWING = new Set(["inline", "inline-block", "contents"]);

/** True if an element has a visible background, outline or border. */
const isBoxed = (style: CSSStyleDeclaration): boolean =>
  isVisible(style.backgroundColor) ||
  (style.outlineStyle !== "none" && pixels(style.outlineWidth) > 0) ||
  (pixels(style.borderLeftWidth) > 0 && isVisible(style.borderLeftColor));

const isHidden = ({ display, visibility, clipPath }: CSSStyleDeclaration): boolean =>
  display === "none" || visibility === "hidden" || clipPath !== "none";

/** True if an element clips its content. */
function isClipping(element: Element, { overflowX, display }: CSSStyleDeclaration, radius: number): boolean {
  if (overflowX === "visible" || display === "inline" || element instanceof HTMLCanvasElement) return false;
  const { scrollWidth, clientWidth, scrollHeight, clientHeight } = element;
  return scrollWidth > clientWidth || scrollHeight > clientHeight || radius > 0;
}

/** Draw an element with its background, borders, content and outline. */
function drawElement(element: Element, into: Element, drawing: Drawing): void {
  const style = getComputedStyle(element);
  if (isHidden(style)) return;
  const isPicture = element instanceof SVGSVGElement || element instanceof HTMLCanvasElement;
  // Elements with a visible box are drawn separately. The remaining texts of a line are drawn as one.
  const isApart = isPicture || isBoxed(style) || !FLOWING.has(style.display);
  const box = boxOf(element.getBoundingClientRect(), drawing);
  if (isPicture) endBefore(box, drawing);
  if (isApart) endLine(drawing);
  if (element instanceof SVGSVGElement) return drawSvg(element, into, drawing);
  const radius = radiusOf(style, box);
  const fragments = style.display === "inline" ? [...element.getClientRects()] : [element.getBoundingClientRect()];
  for (const fragment of fragments) {
    const part = boxOf(fragment, drawing);
    drawBackground(style, part, radius, into);
    drawBorders(style, part, radius, into);
    if (!drawing.clipped) drawing.extent.include(part);
  }
  const clips = isClipping(element, style, radius);
  if (clips) endLine(drawing);
  const content = clips ? clippedGroup(box, radius, drawing) : into;
  const inner = clips ? { ...drawing, clipped: true } : drawing;
  if (element instanceof HTMLCanvasElement) drawCanvas(element, box, content, inner);
  drawContent(element, content, inner);
  if (isApart || clips) endLine(inner);
  if (clips) into.append(content);
  for (const fragment of fragments) drawOutline(style, boxOf(fragment, drawing), radius, into, drawing);
}

function drawContent(element: Element, into: Element, drawing: Drawing): void {
  for (const child of element.childNodes) {
    if (child instanceof Text) drawText(child, into, drawing);
    else if (child instanceof Element) drawElement(child, into, drawing);
  }
}

/** Draw an element in the layout of the page. */
function drawPicture(element: Element, title: string): SVGElement {
  const line = { pieces: [], into: null };
  const origin = element.getBoundingClientRect();
  const drawing: Drawing = { origin, extent: new Extent(), clips: [], clipped: false, line };
  const marks = shape("g");
  drawElement(element, marks, drawing);
  endLine(drawing);
  const { left, top, right, bottom } = drawing.extent;
  // Fractional pixels at an edge would be partly transparent.
  const [x, y] = [Math.floor(left) - MARGIN, Math.floor(top) - MARGIN];
  const size = { width: Math.ceil(right) + MARGIN - x, height: Math.ceil(bottom) + MARGIN - y };
  const paper = shape("rect", { x, y, ...size, fill: "#ffffff" });
  const definitions = drawing.clips.length > 0 ? [shape("defs", {}, ...drawing.clips)] : [];
  const viewBox = `${x} ${y} ${size.width} ${size.height}`;
  return shape("svg", { ...size, viewBox }, shape("title", {}, title), ...definitions, paper, marks);
}

/** Return a view as SVG, without controls and in light colours. */
export function pictureOf(view: HTMLElement, title: string): string {
  const scrolled = [...view.querySelectorAll("*")].filter(({ scrollTop, scrollLeft }) => scrollTop || scrollLeft);
  const places = scrolled.map(({ scrollTop, scrollLeft }) => ({ scrollTop, scrollLeft }));
  const { scrollX, scrollY } = window;
  view.classList.add("paper");
  showAtOnce(() => (saving.value = true)); // redraws the canvases; browsers do not paint before the return
  try {
    return new XMLSerializer().serializeToString(drawPicture(view, title));
  } finally {
    showAtOnce(() => (saving.value = false));
    view.classList.remove("paper");
    for (const [n, element] of scrolled.entries()) Object.assign(element, places[n]);
    scrollTo({ left: scrollX, top: scrollY, behavior: "instant" });
  }
}

/** Return an SVG as PNG, with two pixels per CSS pixel if the canvas does not become too large. */
export async function pngOf(svg: string): Promise<Blob> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const scale = Math.min(PNG_SCALE, MAX_PNG_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(image.width * scale);
  canvas.height = Math.round(image.height * scale);
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) =>
    canvas.toBlob((blob) =>
      blob ? resolve(blob) : reject(new Error("the browser could not create a PNG; save the view as SVG")),
    ),
  );
}
