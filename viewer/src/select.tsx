// A labelled choice of one of several texts.

export function Select<T extends string>({ label, value, options, choose }: { label: string; value: T; options: [T, string][]; choose: (to: T) => void }) {
  return (
    <label>
      {label}{" "}
      <select value={value} onChange={(event) => choose(event.currentTarget.value as T)}>
        {options.map(([name, text]) => <option key={name} value={name}>{text}</option>)}
      </select>
    </label>
  );
}
