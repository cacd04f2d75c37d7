// Two surfaces to draw on, with one set of strokes: a canvas for the screen and PNG, and SVG.

export interface Surface {
  image(canvas: HTMLCanvasElement, from: Box, to: Box): void;
  box(box: Box, fill: string): void;
  frame(box: Box, stroke: string, width: number): void;
  path(points: [number, number][], fill: string): void;
  curve(d: string, stroke: string, width: number, opacity: number): void; // `d` as in SVG
  text(text: string, x: number, y: number, options: TextOptions): void;
  within(box: Box, draw: () => void): void;
}

export interface Box {
  x: number;
  y: number;
  width: number;
  height: number;
}

export interface TextOptions {
  fill: string;
  anchor: "start" | "middle" | "end";
  size: number;
  upright?: boolean; // turned by a quarter, read from below
  bold?: boolean;
}

/** Lines across a box: it holds no value. */
export function hatch(surface: Surface, box: Box, stroke: string): void {
  const { x, y, width, height } = box;
  const lines = Array.from({ length: Math.ceil((width + height) / HATCH) }, (_, n) => `M${x + n * HATCH} ${y}L${x + n * HATCH - height} ${y + height}`);
  surface.within(box, () => surface.curve(lines.join(""), stroke, 1, 0.35));
}

const HATCH = 7; // from line to line

export const FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";

export class CanvasSurface implements Surface {
  constructor(private readonly context: CanvasRenderingContext2D, private readonly font = FONT) {
    context.imageSmoothingEnabled = false;
  }

  image(canvas: HTMLCanvasElement, from: Box, to: Box): void {
    this.context.drawImage(canvas, from.x, from.y, from.width, from.height, to.x, to.y, to.width, to.height);
  }

  box({ x, y, width, height }: Box, fill: string): void {
    this.context.fillStyle = fill;
    this.context.fillRect(x, y, width, height);
  }

  frame({ x, y, width, height }: Box, stroke: string, line: number): void {
    this.context.strokeStyle = stroke;
    this.context.lineWidth = line;
    this.context.strokeRect(x, y, width, height);
  }

  path(points: [number, number][], fill: string): void {
    this.context.fillStyle = fill;
    this.context.beginPath();
    for (const [x, y] of points) this.context.lineTo(x, y);
    this.context.fill();
  }

  curve(d: string, stroke: string, width: number, opacity: number): void {
    this.context.save();
    this.context.globalAlpha = opacity;
    this.context.strokeStyle = stroke;
    this.context.lineWidth = width;
    this.context.stroke(new Path2D(d));
    this.context.restore();
  }

  text(text: string, x: number, y: number, { fill, anchor, size, upright, bold }: TextOptions): void {
    const context = this.context;
    context.save();
    context.translate(x, y);
    if (upright) context.rotate(-Math.PI / 2);
    context.fillStyle = fill;
    context.font = `${bold ? "bold " : ""}${size}px ${this.font}`;
    context.direction = "ltr"; // also where the text is written from right to left
    context.textAlign = anchor === "start" ? "left" : anchor === "end" ? "right" : "center";
    context.textBaseline = "middle";
    context.fillText(text, 0, 0);
    context.restore();
  }

  within({ x, y, width, height }: Box, draw: () => void): void {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    draw();
    this.context.restore();
  }
}

/** A text without what XML does not allow: control characters, and halves of surrogate pairs. */
const lawful = (text: string) => text.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, "\ufffd");
const escaped = (text: string) =>
  lawful(text).replace(/[&<>"]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each]!);
const short = (value: number) => String(+value.toFixed(2));
/** Colours as every program that reads SVG knows them: #rrggbb. */
const plain = (colour: string) => colour.replace(/^rgb\((\d+) (\d+) (\d+)\)$/, (_, ...parts) => `#${parts.slice(0, 3).map((each) => Number(each).toString(16).padStart(2, "0")).join("")}`);

const SHARP = 2; // pixels of an image for each unit, at least

export class SvgSurface implements Surface {
  private parts: string[] = [];
  private clips = 0;

  constructor(private readonly font = FONT) {}

  image(canvas: HTMLCanvasElement, from: Box, to: Box): void {
    // Programs that ignore `image-rendering` smooth an image: of a larger one they blur less than a cell.
    const times = [to.width / from.width, to.height / from.height].map((each) => Math.max(1, Math.ceil(SHARP * each)));
    const large = document.createElement("canvas");
    [large.width, large.height] = [Math.round(from.width * times[0]), Math.round(from.height * times[1])];
    const context = large.getContext("2d")!;
    context.imageSmoothingEnabled = false;
    context.drawImage(canvas, from.x, from.y, from.width, from.height, 0, 0, large.width, large.height);
    this.parts.push(
      `<image x="${short(to.x)}" y="${short(to.y)}" width="${short(to.width)}" height="${short(to.height)}" ` +
        `preserveAspectRatio="none" style="image-rendering:pixelated" href="${large.toDataURL()}"/>`,
    );
  }

  box({ x, y, width, height }: Box, fill: string): void {
    this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="${plain(fill)}"/>`);
  }

  frame({ x, y, width, height }: Box, stroke: string, line: number): void {
    this.parts.push(
      `<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="none" stroke="${stroke}" stroke-width="${line}"/>`,
    );
  }

  path(points: [number, number][], fill: string): void {
    const corners = points.map(([x, y]) => `${short(x)},${short(y)}`).join(" ");
    this.parts.push(`<polygon points="${corners}" fill="${plain(fill)}"/>`);
  }

  curve(d: string, stroke: string, width: number, opacity: number): void {
    const rounded = d.replace(/-?\d+\.\d+/g, (each) => short(Number(each)));
    this.parts.push(`<path d="${rounded}" fill="none" stroke="${stroke}" stroke-width="${short(width)}" stroke-opacity="${short(opacity)}" shape-rendering="auto"/>`);
  }

  text(text: string, x: number, y: number, { fill, anchor, size, upright, bold }: TextOptions): void {
    const turned = upright ? ` transform="rotate(-90 ${short(x)} ${short(y)})"` : "";
    // dy: few programs besides browsers know dominant-baseline
    this.parts.push(
      `<text x="${short(x)}" y="${short(y)}" dy=".35em" text-anchor="${anchor}" font-size="${size}" ` +
        `fill="${plain(fill)}"${bold ? ' font-weight="bold"' : ""}${turned}>${escaped(text)}</text>`,
    );
  }

  within({ x, y, width, height }: Box, draw: () => void): void {
    const name = `c${this.clips++}`;
    this.parts.push(
      `<clipPath id="${name}"><rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"/></clipPath>` +
        `<g clip-path="url(#${name})">`,
    );
    draw();
    this.parts.push("</g>");
  }

  /** The document. */
  written(width: number, height: number, title: string): string {
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" ` +
      `font-family="${this.font}" shape-rendering="crispEdges"><title>${escaped(title)}</title>${this.parts.join("")}</svg>`
    );
  }
}
