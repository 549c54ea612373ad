// Files that a view is saved as.

const STYLES = [
  ...[
    "fill",
    "fill-opacity",
    "stroke",
    "stroke-width",
    "stroke-dasharray",
    "stroke-linecap",
    "stroke-opacity",
    "opacity",
    "font-family",
    "font-size",
  ],
  ...["font-weight", "text-anchor", "dominant-baseline"],
];
const LAYOUT_STYLES = [
  ...[
    "display",
    "color",
    "background-color",
    "background-image",
    "border",
    "border-radius",
    "padding",
    "margin",
    "gap",
  ],
  ...["font-style", "line-height", "white-space", "width", "height", "text-align", "flex", "flex-wrap", "align-items"],
  ...["grid-template-columns", "box-sizing", "position", "left", "top", "text-decoration", "outline", "vertical-align"],
];
const TITLE_HEIGHT = 34;
const MARGIN = 12;

function save(name: string, url: string): void {
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
export const saveText = (name: string, text: string, type = "text/csv") =>
  save(name, URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` })));

/** A copy of an element that looks the same outside of the page; canvases become images. */
function copyOf(element: Element): Element | null {
  const style = getComputedStyle(element);
  if (style.display === "none" || element.matches(".controls, .files, [role=tooltip], title, .noprint")) return null;
  if (element instanceof HTMLCanvasElement) {
    const image = document.createElement("img");
    Object.assign(image, { src: element.toDataURL() });
    image.setAttribute("style", `width: ${element.clientWidth}px; height: ${element.clientHeight}px`);
    return image;
  }
  const copy = element.cloneNode(false) as Element;
  for (const { name } of [...copy.attributes])
    if (/^(class|id|on|aria|role|tabindex|data-)/.test(name)) copy.removeAttribute(name);
  const names = element instanceof SVGElement ? STYLES : [...LAYOUT_STYLES, ...STYLES.slice(7)];
  copy.setAttribute("style", names.map((name) => `${name}: ${style.getPropertyValue(name)}`).join("; "));
  for (const child of element.childNodes) {
    const part = child instanceof Element ? copyOf(child) : child.cloneNode();
    if (part) copy.append(part);
  }
  return copy;
}

/** The view as an SVG with a title; a view that is one drawing holds no HTML. */
function pictureOf(body: HTMLElement, title: string): { text: string; width: number; height: number } {
  const drawings = body.querySelectorAll("svg.chart");
  const html = body.querySelector("canvas, .words, table, ol") !== null || drawings.length === 0;
  const boxes = html ? [body] : [...drawings];
  const frame = body.getBoundingClientRect();
  const width = Math.ceil(frame.width) + 2 * MARGIN;
  const height = Math.ceil(frame.height) + TITLE_HEIGHT + MARGIN;
  const parts = boxes.map((box) => {
    const { x, y, width: wide, height: tall } = box.getBoundingClientRect();
    const copy = copyOf(box)!;
    const place = `x="${x - frame.x + MARGIN}" y="${y - frame.y + TITLE_HEIGHT}" width="${wide}" height="${tall + 2}"`;
    const inner = new XMLSerializer().serializeToString(copy);
    return html ? `<foreignObject ${place}>${inner}</foreignObject>` : `<svg ${place}>${inner}</svg>`;
  });
  const { backgroundColor, color, fontFamily } = getComputedStyle(document.body);
  const heading = new XMLSerializer().serializeToString(
    Object.assign(document.createElementNS("http://www.w3.org/2000/svg", "text"), { textContent: title }),
  );
  const text =
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">` +
    `<rect width="100%" height="100%" fill="${backgroundColor}"/><g transform="translate(${MARGIN} 22)" fill="${color}" ` +
    `font-family='${fontFamily.replaceAll("'", '"').replaceAll('"', "")}' font-size="14" font-weight="600">${heading}</g>${parts.join("")}</svg>`;
  return { text, width, height };
}

export async function savePicture(body: HTMLElement, name: string, kind: "svg" | "png", title: string): Promise<void> {
  const { text, width, height } = pictureOf(body, title);
  if (kind === "svg") return saveText(name, text, "image/svg+xml");
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  canvas.getContext("2d")!.drawImage(image, 0, 0, 2 * width, 2 * height);
  canvas.toBlob((blob) => save(name, URL.createObjectURL(blob!)));
}
