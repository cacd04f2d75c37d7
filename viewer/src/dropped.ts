// A file that is dropped onto the page, or chosen: a recording of headscope, or another of its pages. It is read in the page, and
// nothing leaves the machine.

import type { Data, Layer } from "./data";
import { readRecording } from "./recording_file";
import { MOST_BYTES, Unreadable } from "./safetensors";
import { type PageData, pageSide, type Side } from "./side";
import { dropped as texts } from "./texts";

const MARKER = "<!-- headscope report -->";

/** The recording in a file; an error is one sentence. */
export async function readDropped(file: File): Promise<Side> {
  if (file.size === 0) throw new Unreadable(texts.empty(file.name));
  let start: string;
  try {
    start = await file.slice(0, 256).text();
  } catch {
    throw new Unreadable(texts.unreadable(file.name)); // a folder, or a file without permission
  }
  if (start.includes(MARKER)) return readPage(file);
  return readRecording(file);
}

async function readPage(file: File): Promise<Side> {
  if (file.size > MOST_BYTES) throw new Unreadable(texts.tooLarge(file.name, MOST_BYTES / 2 ** 20));
  const html = await file.text();
  const element = (id: string): string | null => {
    const start = `id="${id}">`;
    const from = html.indexOf(start);
    const stop = from < 0 ? -1 : html.indexOf("</script>", from);
    return stop < 0 ? null : html.slice(from + start.length, stop);
  };
  const [json, blocks] = [element("data"), element("blocks")];
  if (json === null || blocks === null || !html.trimEnd().endsWith("</html>")) throw new Unreadable(texts.truncated(file.name));
  let from: unknown;
  try {
    from = JSON.parse(json);
  } catch {
    throw new Unreadable(texts.damaged(file.name, texts.pageData));
  }
  if (!isPageData(from)) throw new Unreadable(texts.damaged(file.name, texts.pageData));
  return pageSide(from, blocks);
}

function isWhole(value: unknown, most: number): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0 && (value as number) <= most;
}

function isText(value: unknown): value is string {
  return typeof value === "string";
}

function listOf<T>(value: unknown, length: number, check: (each: unknown) => each is T): value is T[] {
  return Array.isArray(value) && value.length === length && value.every(check);
}

const FAR = Number.MAX_SAFE_INTEGER;
const anyWhole = (value: unknown): value is number => isWhole(value, FAR);
const figure = (value: unknown): value is number | null => value === null || Number.isFinite(value);

function isLayer(layer: Layer, from: PageData): boolean {
  if (typeof layer !== "object" || layer === null) return false;
  const { heads, map, lengths, segments } = layer;
  const pair = (value: unknown): value is [number, number] => listOf(value, 2, anyWhole);
  const known = (value: unknown) => value === undefined || value === null || listOf(value, heads, (each): each is number => isWhole(each, (from.numbers?.length ?? 0) - 1));
  return (
    [layer.name, layer.short, layer.kind].every(isText) && (layer.key === undefined || isText(layer.key)) && isWhole(heads, 2 ** 20) && heads > 0
    && [layer.runs, layer.lookedAt, layer.of, layer.received, layer.receivedOf, layer.entropy, layer.entropyOf, layer.edges].every(anyWhole)
    && listOf(layer.rows, heads, anyWhole) && listOf(layer.broken, heads, anyWhole) && listOf(layer.blocks, heads, pair)
    && (lengths === null || pair(lengths)) && Array.isArray(layer.top) && layer.top.every(anyWhole)
    && (map === null || (isWhole(map?.rows, 2 ** 15) && isWhole(map.columns, 2 ** 15) && listOf(map.masks, heads, (each): each is number => isWhole(each, from.masks.length - 1)) && listOf(map.widths, 4, (each): each is number => isWhole(each, 4))))
    && (segments === null || segments === undefined || (Array.isArray(segments.names) && segments.names.every(isText) && isText(segments.mean) && isText(segments.withoutFirst ?? "") && Array.isArray(segments.holders ?? []) && (segments.holders ?? []).every(anyWhole) && listOf(segments.rows, heads, (row): row is number[] => listOf(row, segments.names.length, anyWhole))))
    && known(layer.counts) && known(layer.eligible)
  );
}

/** Whether the data of another page has what is read of it. */
function isPageData(value: unknown): value is PageData {
  if (typeof value !== "object" || value === null) return false;
  const from = value as Data;
  const { layers, masks, bits, names, statistics, tokens, numbers, origin } = from;
  const columns = (each: unknown, heads: number) =>
    typeof each === "object" && each !== null && ["mean", "std", "min", "max", "count"].every((what) => listOf((each as Record<string, unknown>)[what], heads, figure));
  return (
    Array.isArray(layers) && layers.length > 0 && Array.isArray(masks) && masks.every(isText) && (bits === 8 || bits === 16)
    && Array.isArray(names) && names.every((each) => isText(each?.name) && isText(each.heading) && isText(each.meaning))
    && (numbers === undefined || (Array.isArray(numbers) && numbers.every((list) => Array.isArray(list) && list.length % 3 === 0 && list.every(Number.isSafeInteger) && total(list) <= 2 ** 26)))
    && layers.every((layer) => isLayer(layer, from))
    && Array.isArray(statistics) && statistics.length === layers.length && statistics.every((of, n) => typeof of === "object" && of !== null && Object.values(of).every((each) => columns(each, layers[n].heads)))
    && (tokens === null || (Array.isArray(tokens?.labels) && tokens.labels.every(isText) && Object.values(tokens.longer ?? { missing: null }).every(isText)))
    && (origin === undefined || origin === null || (isText(origin.model) && isText(origin.config) && typeof origin.layers === "object" && origin.layers !== null))
  );
}

/** How many numbers a list of runs holds. */
function total(runs: number[]): number {
  let sum = 0;
  for (let n = 2; n < runs.length; n += 3) sum += runs[n] >= 0 ? runs[n] : Infinity;
  return sum;
}
