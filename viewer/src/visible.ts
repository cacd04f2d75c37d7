// Texts of a file on one line with every character visible, as src/headscope/report/_texts.py shows those of this page.

const SHOWN: Record<string, string> = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥" };

export const NAME = 80; // characters of the name of a file

const BYTES = /^( ?)((?:\\x[89a-f][0-9a-f])+)$/; // a token of bytes that are no whole character

/** As much of a text as so many characters hold; without `blanks` a space stays a space. */
export function labelled(text: string, limit: number, blanks = true): string {
  const bytes = BYTES.exec(text);
  if (bytes) text = bytes[1] + bytes[2].replace(/\\x(..)/g, "⟨$1⟩");
  const letters = [...text.slice(0, 2 * limit + 2)].slice(0, limit + 1);
  let shown = letters.map((letter) => (letter === " " && !blanks ? " " : (SHOWN[letter] ?? escaped(letter)))).join("");
  if (/^\p{M}/u.test(text) && !/^\p{Me}/u.test(text)) shown = `◌${shown}`;
  const all = [...shown];
  return (letters.length > limit || all.length > limit ? `${all.slice(0, limit - 1).join("")}…` : shown) || "∅";
}

/** Controls, joiners, marks of direction, lone surrogates, private and unassigned characters, and other blanks as escapes. */
function escaped(letter: string): string {
  if (!/[\p{C}\p{Z}]/u.test(letter)) return letter;
  const code = letter.codePointAt(0)!.toString(16);
  return code.length <= 4 ? `\\u${code.padStart(4, "0")}` : `\\U${code.padStart(8, "0")}`;
}
