// The recording that this page is compared with: one that the page came with, or one that was dropped onto it.

import { useEffect, useState } from "preact/hooks";
import { comparable, compared, type Compared, type Distances, distancesOf } from "./comparing";
import { readDropped } from "./dropped";
import { Unreadable } from "./safetensors";
import { ownSide, type PageData, pageSide, type Side } from "./side";
import { changes as texts, dropped } from "./texts";
import { labelled, NAME } from "./visible";

export interface Other {
  labels: [string, string];
  file: string; // the name of the file that was dropped; "" where the page came with both
  side: Side;
  is: Compared;
}

/** What is going on with a file: it is read, or why it was not. */
export interface Offer {
  progress: string;
  error: string;
}

let current: Other | null = embedded();
let offer: Offer = { progress: "", error: "" };
let stop = new AbortController();
const listeners = new Set<() => void>();

/** The recording that the page came with. */
function embedded(): Other | null {
  const text = document.getElementById("other")?.textContent;
  if (!text) return null;
  const from = JSON.parse(text) as PageData & { labels: [string, string]; distances: Distances[] };
  const side = pageSide(from, document.getElementById("other-blocks")!.textContent!);
  return { labels: from.labels, file: "", side, is: compared(ownSide(), side, comparable(ownSide(), side), from.distances, false) };
}

export function other(): Other | null {
  return current;
}

/** The name of the file that was dropped onto the page; "" if there is none. */
export function comparedFile(): string {
  return current?.file ?? "";
}

export function isReading(): boolean {
  return offer.progress !== "";
}

function set(to: Partial<Offer>, is?: Other): void {
  offer = { progress: "", error: "", ...to };
  if (is) current = is;
  for (const each of listeners) each();
}

export function useOther(): { other: Other | null; offer: Offer } {
  const [, again] = useState({});
  useEffect(() => {
    const changed = () => again({});
    listeners.add(changed);
    return () => void listeners.delete(changed);
  }, []);
  return { other: current, offer };
}

export function dismiss(): void {
  stop.abort();
  set({});
}

/** Read a file and compare this page with it; where that fails, the page stays as it was. Resolves to whether it was read. */
export async function read(files: FileList | File[]): Promise<boolean> {
  stop.abort();
  stop = new AbortController();
  const { signal } = stop;
  if (files.length !== 1) {
    set({ error: dropped.one(files.length) });
    return false;
  }
  const [file] = files;
  const name = labelled(file.name, NAME, false);
  set({ progress: dropped.reading(name) });
  try {
    const side = await readDropped(file);
    const mine = ownSide();
    const shared = comparable(mine, side);
    const distances = await distancesOf(mine, side, shared, (head, of) => signal.aborted || set({ progress: dropped.comparing(name, head, of) }), signal);
    signal.throwIfAborted();
    set({}, { labels: [mine.title || texts.thisPage, name], file: name, side, is: compared(mine, side, shared, distances, true) });
    return true;
  } catch (error) {
    if (signal.aborted) return false; // another file came, or the reader ended it
    set({ error: error instanceof Unreadable ? error.message : dropped.damaged(name, dropped.contents) });
    return false;
  }
}
