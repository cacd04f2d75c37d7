// Heads whose q, k and lse lie in the page: a worker, made from the page itself, computes pieces of their weights.

import { data, type Layer } from "./data";
import { type Answer, type Blocks, type ExactHead, type Reason, type Request, type Which, work } from "./exact_worker";

const MOST_FLOATS = 2 ** 26; // of q and k of the heads that the worker holds: 256 MB

/** A head whose weights the page computes; null for other heads. `window`: of a text that was read in windows. */
export function embedded(layer: Layer, head: number, window: number | null = null): ExactHead | null {
  return data.exact.find((each) => each.layer === layer.index && each.head === head && (each.window ?? window) === window) ?? null;
}

/** The windows for which the page computes the weights of a head, in the order of the text. */
export function heldWindows(layer: Layer, head: number): number[] {
  return data.exact.filter((each) => each.layer === layer.index && each.head === head && (each.window ?? null) !== null).map((each) => each.window!).sort((a, b) => a - b);
}

/** How many queries and keys the run has whose single weights are known for some head of a layer; null if there are none. `window`: of a
 * text that was read in windows; undefined = any of them. */
export function tiledLengths(layer: number, window?: number): [number, number] | null {
  const known = data.exact.find((each) => each.layer === layer && (window === undefined || (each.window ?? window) === window));
  return data.served?.[layer] ?? known?.lengths ?? null;
}

let worker: Worker | null = null;
let content = ""; // read when it is first needed: it may be 96 MB
let requests = 0;
const waiting = new Map<number, { done: (answer: Answer) => void; failed: (error: Error) => void }>();
const held = new Map<ExactHead, Promise<unknown>>(); // the heads that the worker has, the last used one at the end

function start(): Worker {
  const url = URL.createObjectURL(new Blob([`(${work})(self)`], { type: "text/javascript" }));
  const started = new Worker(url);
  started.onmessage = ({ data: answer }: MessageEvent<Answer>) => {
    const request = waiting.get(answer.id);
    waiting.delete(answer.id);
    if (answer.error) request?.failed(new Error(answer.error));
    else request?.done(answer);
  };
  started.onerror = (event) => {
    for (const { failed } of waiting.values()) failed(new Error(event.message));
    waiting.clear();
  };
  return started;
}

function ask(request: Request): Promise<Answer> {
  worker ??= start();
  return new Promise((done, failed) => {
    waiting.set(request.id, { done, failed });
    worker!.postMessage(request);
  });
}

/** Four characters of base64 hold three bytes, and every block begins at a multiple of three. */
function block(at: [number, number] | undefined): [string, number] | null {
  if (!at) return null;
  content ||= document.getElementById("exact")!.textContent!;
  return [content.slice((at[0] / 3) * 4, (at[0] / 3) * 4 + Math.ceil(at[1] / 3) * 4), at[1]];
}

function which({ layer, head, window }: ExactHead): Which {
  return { layer, head, window: window ?? null };
}

function floats({ lengths, depth }: ExactHead): number {
  return (lengths[0] + lengths[1]) * depth;
}

/** Give the worker a head before what is asked next, because it works in order, and take from it those that were not used for longest. */
function open(head: ExactHead): Promise<unknown> {
  const opening = held.get(head) ?? ask({ id: requests++, what: "open", head, blocks: blocksOf(head) });
  held.delete(head);
  held.set(head, opening);
  opening.catch(() => held.delete(head));
  for (const other of held.keys()) {
    if ([...held.keys()].reduce((sum, each) => sum + floats(each), 0) <= MOST_FLOATS || other === head) break;
    held.delete(other);
    worker!.postMessage({ id: requests++, what: "close", ...which(other) } satisfies Request);
  }
  return opening;
}

function blocksOf(head: ExactHead): Blocks {
  const { q, k, lse, spans, rest, bias } = head;
  return { q: block(q.at), k: block(k.at), lse: block(lse), spans: block(spans?.at), rest: block(rest?.at), bias: block(bias?.at) };
}

let last: Promise<unknown> = Promise.resolve();

/** The mean and the max of cells, as the server's tiles have them, once the tile before is there: until then it may be aborted. */
export function exactTile(head: ExactHead, queries: [number, number], keys: [number, number], size: number, signal: AbortSignal): Promise<{ mean: Float32Array; max: Float32Array }> {
  const found = last.then(async () => {
    signal.throwIfAborted();
    const [, answer] = await Promise.all([open(head), ask({ id: requests++, what: "tile", ...which(head), queries, keys, size })]);
    return answer.tile!;
  });
  last = found.catch(() => undefined);
  return found;
}

/** How the weight of a query on a key comes about. */
export async function reasonOf(head: ExactHead, query: number, key: number): Promise<Reason> {
  const [, answer] = await Promise.all([open(head), ask({ id: requests++, what: "reason", ...which(head), query, key })]);
  return answer.reason!;
}
