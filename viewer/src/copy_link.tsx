// Copies the address of what is shown, and says what a link cannot hold: a page on a disk, and a file that was dropped.

import { useState } from "preact/hooks";
import { comparedFile } from "./other";
import { address, type State } from "./state";
import { bar, links } from "./texts";

/** The page's own file name: empty where the address ends in a slash. */
function fileName(): string {
  const last = location.pathname.split("/").pop()!;
  try {
    return decodeURIComponent(last);
  } catch {
    return last; // a lone per cent sign
  }
}

export function CopyLink({ state }: { state: State }) {
  const against = comparedFile() || state.against;
  const part = address(state, true);
  return (
    <>
      <Copy label={bar.copyLink} text={location.href.replace(/#.*$/, "") + part} />
      {location.protocol === "file:" && (
        <p class="hint link-hint">
          {links.onThisDisk} <Copy label={links.copyPart} text={fileName() + part} /> <code class="link-part">{fileName() + part}</code>
        </p>
      )}
      {against && <p class="hint link-hint">{links.lacks(against)}</p>}
    </>
  );
}

/** A button that copies a text, and says so for a while. */
function Copy({ label, text }: { label: string; text: string }) {
  const [copied, setCopied] = useState(false);
  const copy = () => {
    const done = () => {
      setCopied(true);
      setTimeout(() => setCopied(false), 2000);
    };
    if (navigator.clipboard) void navigator.clipboard.writeText(text).then(done, () => byHand(text) && done());
    else if (byHand(text)) done();
  };
  return <button type="button" onClick={copy}><span aria-live="polite">{copied ? bar.copied : label}</span></button>;
}

/** Copies a text where a page from a disk may not use the clipboard. */
function byHand(text: string): boolean {
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}
