// Two surfaces to draw on, with one set of strokes: a canvas for the screen and PNG, and SVG.

export interface Surface {
  image(canvas: HTMLCanvasElement, from: Box, to: Box): void;
  box(box: Box, fill: string): void;
  frame(box: Box, stroke: string, width: number): void;
  path(points: [number, number][], fill: string): void;
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
}

export const FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";

export class CanvasSurface implements Surface {
  constructor(private readonly context: CanvasRenderingContext2D) {
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

  text(text: string, x: number, y: number, { fill, anchor, size, upright }: TextOptions): void {
    const context = this.context;
    context.save();
    context.translate(x, y);
    if (upright) context.rotate(-Math.PI / 2);
    context.fillStyle = fill;
    context.font = `${size}px ${FONT}`;
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

const escaped = (text: string) =>
  text.replace(/[&<>"]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each]!);
const short = (value: number) => String(+value.toFixed(2));

export class SvgSurface implements Surface {
  private parts: string[] = [];
  private clips = 0;

  image(canvas: HTMLCanvasElement, from: Box, to: Box): void {
    const cut = document.createElement("canvas");
    const [left, top] = [Math.max(0, Math.floor(from.x)), Math.max(0, Math.floor(from.y))];
    cut.width = Math.min(canvas.width, Math.ceil(from.x + from.width)) - left;
    cut.height = Math.min(canvas.height, Math.ceil(from.y + from.height)) - top;
    cut.getContext("2d")!.drawImage(canvas, -left, -top);
    const [across, down] = [to.width / from.width, to.height / from.height];
    const at = { x: to.x + (left - from.x) * across, y: to.y + (top - from.y) * down };
    this.parts.push(
      `<image x="${short(at.x)}" y="${short(at.y)}" width="${short(cut.width * across)}" height="${short(cut.height * down)}" ` +
        `preserveAspectRatio="none" style="image-rendering:pixelated" href="${cut.toDataURL()}"/>`,
    );
  }

  box({ x, y, width, height }: Box, fill: string): void {
    this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="${fill}"/>`);
  }

  frame({ x, y, width, height }: Box, stroke: string, line: number): void {
    this.parts.push(
      `<rect x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}" fill="none" stroke="${stroke}" stroke-width="${line}"/>`,
    );
  }

  path(points: [number, number][], fill: string): void {
    const corners = points.map(([x, y]) => `${short(x)},${short(y)}`).join(" ");
    this.parts.push(`<polygon points="${corners}" fill="${fill}"/>`);
  }

  text(text: string, x: number, y: number, { fill, anchor, size, upright }: TextOptions): void {
    const turned = upright ? ` transform="rotate(-90 ${short(x)} ${short(y)})"` : "";
    this.parts.push(
      `<text x="${short(x)}" y="${short(y)}" dominant-baseline="central" text-anchor="${anchor}" font-size="${size}" ` +
        `fill="${fill}"${turned}>${escaped(text)}</text>`,
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
      `font-family="${FONT}"><title>${escaped(title)}</title>${this.parts.join("")}</svg>`
    );
  }
}
