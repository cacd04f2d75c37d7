// Files to compare the page with: a button that opens a file chooser, files that are dropped, and what becomes of them.

import { useEffect, useRef, useState } from "preact/hooks";
import { data } from "./data";
import { comparedFile, dismiss, read, useOther } from "./other";
import type { State } from "./state";
import { bar, dropped as texts, links, names } from "./texts";

type Changed = (part: Partial<State>) => void;

interface Props {
  state: State;
  change: Changed;
}

/** Whether the address names a file that has not been dropped yet. */
function isAwaited(state: State): boolean {
  return state.against !== "" && comparedFile() === "";
}

/** The file that the address names is shown as the address has it; another one from the beginning. */
async function offered(files: FileList | File[], { state, change }: Props): Promise<void> {
  const awaited = isAwaited(state);
  if (await read(files)) change(awaited && comparedFile() === state.against ? {} : { view: "changes", onlyMoved: true });
}

/** A button that opens a file chooser. */
export function CompareWith({ state, change, label = bar.compareWith }: Props & { label?: string }) {
  const input = useRef<HTMLInputElement>(null);
  const chosen = () => {
    const files = [...input.current!.files!];
    input.current!.value = ""; // the same file may be chosen again
    if (files.length > 0) void offered(files, { state, change });
  };
  if (data.history) return null; // a training's history has no counterpart
  return (
    <span class="compare-with">
      <button type="button" title={bar.compareHelp} onClick={() => input.current!.click()}>{label}</button>
      <input type="file" ref={input} accept=".safetensors,.html" aria-label={label} hidden onChange={chosen} />
    </span>
  );
}

/** Files may be dropped anywhere on the page. */
export function useDrop({ state, change }: Props): void {
  const now = useRef(state);
  now.current = state;
  useEffect(() => {
    if (data.history) return undefined;
    const over = (event: DragEvent) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault(); // the browser would leave the page and open the file
      document.documentElement.dataset.dropping = "";
    };
    const left = (event: DragEvent) => {
      if (event.relatedTarget === null) delete document.documentElement.dataset.dropping;
    };
    const drop = (event: DragEvent) => {
      delete document.documentElement.dataset.dropping;
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      void offered([...event.dataTransfer.files], { state: now.current, change });
    };
    const events = [["dragover", over], ["dragleave", left], ["drop", drop]] as const;
    for (const [name, act] of events) addEventListener(name, act);
    return () => events.forEach(([name, act]) => removeEventListener(name, act));
  }, [change]);
}

/** What is being read, or why a file was not; and where a file may be dropped. */
export function Offered({ state, change }: Props) {
  const { other, offer: { progress, error } } = useOther();
  const [shown, setShown] = useState("");
  useEffect(() => { // what is over at once is not shown
    if (!progress) return setShown("");
    const later = setTimeout(() => setShown(progress), shown ? 0 : 200);
    return () => clearTimeout(later);
  }, [progress]);
  return (
    <>
      <p class="drop-here" aria-hidden="true">{texts.here}</p>
      {isAwaited(state) && !progress && (
        <p class="awaited note" role="status">
          {links.awaited(names.inQuotes(state.against))} <CompareWith {...{ state, change }} label={links.choose} />{" "}
          <button type="button" onClick={() => change({ against: "", ...(other === null && /^changes?$/.test(state.view) ? { view: "heads" } : {}) })}>{links.without}</button>
        </p>
      )}
      {shown && <p class="offer" role="status">{shown} <button type="button" onClick={dismiss}>{texts.cancel}</button></p>}
      {error && <p class="offer note" role="alert">{error} <button type="button" onClick={dismiss}>{texts.close}</button></p>}
    </>
  );
}
