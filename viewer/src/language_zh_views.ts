// Chinese, continued: figures, two recordings, a training's history. Words: 记录 (recording), 警报 (alarm), 步 (step).

import type { Translation } from "./languages";
import { counted, figure, fromTo, percent, span, whole, withSign } from "./texts";

function inLayers(moved: number, layers: string[]): string {
  if (layers.length === 0) return "";
  if (layers.length === 1) return `，${moved === 1 ? "" : "都"}在第 ${layers[0]} 层`;
  return layers.length <= 4 ? `，在第 ${layers.join("、")} 层` : `，分布在 ${layers.length} 层`;
}

/** Which lines there are where no token is chosen. */
export function largestOrAbove(least: string, most: number | null): string {
  return most === null ? `大于 ${least} 的权重` : `这段文本中最大的 ${whole(most)} 个权重`;
}

export const headTip: Translation["headTip"] = {
  strongest: "最强：{pair}，{weight}",
  effective: (keys) => `有效键数：平均 ${keys}`,
  strip: (layer) => `${layer}的各个头`,
};

export const chance: Pick<Translation["segments"], "scale" | "below" | "above" | "within" | "reads" | "readsNone" | "readsWithout" | "readsLess" | "counts" | "withoutIn"> = {
  scale: "份额，与随机相比",
  below: (points) => `低 ${points} 个百分点`,
  above: (points) => `高 ${points} 个百分点`,
  within: (clear) => (clear ? "灰色：份额与随机无法区分：相差不到 3 个标准差，或不到 1%。" : "灰色：份额与随机相差不超过五分之一。"),
  reads: (to, share, chance) => `{head} 读取“${to}”最多：${share}（随机为 ${chance}）。`,
  readsNone: (to, share, chance) => `没有头读取“${to}”明显多于随机。最大份额（{head} 的 ${share}）与随机（${chance}）无法区分。`,
  readsWithout: (share, leads) => `不含第一个词元时为 ${share}${leads ? "，仍为最多" : "；此时 {other} 最多"}。`,
  readsLess: (to) => `没有头读取“${to}”多于随机。`,
  counts: (more, less, of) => `在 ${whole(of)} 个头中，${more === 0 ? "" : `${whole(more)} 个多于随机，`}${whole(less)} 个少于随机。`,
  withoutIn: (share) => `（不含第一个词元为 ${share}）`,
};

export const whose: Translation["whose"] = {
  shows: "此视图显示",
  unlike: "B 的头、长度或图不同，因此此视图只显示 A。单独生成 B 的页面：headscope report B。",
  title: "两个头：A 与 B 各一，或都来自 A",
  group: (side, name) => (side === name ? side : `${side}：${name}`),
  within: "第二个 − 第一个",
  scales: "第二个 − 第一个：橙色表示第二个头的注意力更多，紫色表示更少。两张图都来自 A，共用一个颜色标尺。",
  columns: { a: "第一个", b: "第二个" },
};

export const everyHead: Translation["everyHead"] = {
  label: "该词元在所有头中",
  title: "{token}（{at}）在所有头中最关注的词元。将指针移到单元格上可查看该头的连线。",
  cell: (head, key, weight) => `${head}：${key}，${weight}`,
  none: (head) => `${head}：该词元不在查询之中`,
  always: "无论连线方向如何，表格显示的都是“关注”。",
};

export const figures: Translation["figures"] = {
  figure: "插图",
  of: (what) => `${what}的插图`,
  kinds: { png2: "PNG 2×", png3: "PNG 3×", svg: "SVG" },
  kindHelp: { png2: "用于幻灯片和屏幕", png3: "用于印刷", svg: "文字仍是文字；任意大小都清晰" },
  copy: "复制插图",
  copyHelp: "3 倍的 PNG，可粘贴到文档中",
  copied: "已复制",
  notCopied: "浏览器不允许页面在此复制图片。请改为保存 PNG。",
  saved: (name) => `已保存 ${name}`,
  dark: "深色背景",
  darkHelp: "默认情况下，无论页面主题如何，插图都用白色背景。",
  tooLarge: "插图对此浏览器来说太大。请筛选头，或保存 SVG。",
  model: (name) => `模型：${name}。`,
  input: (text) => `输入：${text}。`,
  range: (rows, row, rowStop, columns, column, columnStop) => `行：${rows} ${fromTo(row, rowStop)}；列：${columns} ${fromTo(column, columnStop)}。`,
  numbered: (at, token) => `${whole(at)} ${token}`,
  pooledTile: "每个单元格汇总多个查询—键对。",
  ofInput: (input) => `${input}的权重。`,
  scale: (scale) => (scale === "linear" ? "线性颜色刻度。" : "对数颜色刻度，跨四个数量级。"),
  signed: "橙色：B 较大；紫色：A 较大。",
  masked: (blank, broken) => `${blank ? "斜线" : "灰色"}：被掩码遮住${broken ? "，或该行含有 NaN 或无穷大" : ""}。`,
  over: "颜色叠加在图像上，与图像混合。",
  rough: "数值以 8 位保存。",
  eachMap: "每幅热图的行是查询，列是键。",
  ownScales: "每幅热图各有自己的颜色刻度。",
  eachPicture: (mean) => `每幅图中，图块的颜色表示落在它上面的注意力：${mean}。`,
  eachPatch: (patch) => `每幅图中，图块的颜色表示${patch}放在它上面的权重；框标出${patch}。`,
  shareOfQuantile: (scale) => `占每幅热图 99.5% 分位数的份额，${{ linear: "线性", log: "对数" }[scale]}`,
  shareOfLargest: (image, scale) => `占每幅${image ? "图" : "热图"}最大权重的份额，${{ linear: "线性", log: "对数" }[scale]}`,
  heads: (count, order) => `${counted(count, "head")}${order && `，按${order}排序`}`,
  match: (about) => [about.includes("%") && "百分数：与模式的匹配度，100% = 完全符合。", about.includes("×") && "× 2：该区域得到的注意力是均匀分布的两倍。"].filter(Boolean).join(""),
  strips: (from, to, first) => `列：查询 ${whole(from)}–${whole(to)}；行：按与查询的距离排列的键${first > 0 ? `，然后是前 ${counted(first, "key")}` : ""}。`,
  tokens: (start, stop) => `词元 ${fromTo(start, stop)}。`,
  linesOfAll: (least, most) => `连线：${largestOrAbove(least, most)}，不含词元自身和第一个词元上的权重。线越粗，权重越大。`,
  linesOfOne: (token, direction, least) => `连线：${{ from: `${token} 关注什么`, to: `什么关注 ${token}`, both: `${token} 关注什么，以及什么关注它` }[direction]}，权重不小于 ${least}。线越粗，权重越大。`,
  patches: {
    image: () => "",
    looks: (name) => `${name}关注什么；带框的是它。`,
    "looked-at": (name) => `什么关注${name}；带框的是它。`,
    all: () => "对所有查询取平均。",
  },
  orLess: (value) => `≤ ${value}`,
  orMore: (value) => `≥ ${value}`,
  allHeads: "所有头",
  map: (head) => `${head}的热图`,
  strip: "附近词元",
  reading: "文本",
  segmentsOf: (head) => `${head}的片段`,
  segmentsOfAll: "所有头的片段",
};

export const compare: Translation["compare"] = {
  title: "两个头",
  a: "头 A",
  b: "头 B",
  difference: "差（B − A）",
  differenceOf: (a, b) => `${b} − ${a}`,
  unlike: "A 和 B 的热图区间不同，因此没有差。",
  statistics: "两个头的统计",
  columns: { mean: "查询平均", a: "A", b: "B", difference: "B − A" },
};

export const table: Translation["table"] = {
  title: "所有头的统计",
  hint: "每个值是对具有该统计量的查询取的平均。熵的单位是奈特（nat）。点击标题可排序。",
  head: "头",
  pattern: "模式",
  score: "匹配度",
  scoreMeaning: "热图与其最佳模式的符合程度：1 = 完全符合，0 = 不高于随机水平。",
};

export const trace: Translation["trace"] = {
  title: "逐步计算",
  hint: "多头注意力的一次前向计算。数值是第一个批次样本、第一个头的前几个。",
  oneLayer: "一次 trace 只针对一个模块，因此本页只有这一层的步骤。其他层请用 headscope.trace(module, x)。",
  size: (letter, size) => `${letter} = ${size}`,
  mistake: "常见错误：",
  here: "此处：",
  unusual: "异常",
};

export const changes: Translation["changes"] = {
  title: "从 A 到 B 的变化",
  thisPage: "本页",
  sides: "A：{a}。B：{b}。",
  summary: (moved, of, layers) => `${whole(of)} 个头中有 ${whole(moved)} 个发生了变化${inLayers(moved, layers)}。`,
  most: "变化最大：{head}（{change}）。",
  none: (of) => `${whole(of)} 个头都没有变化。`,
  largest: "变化最大的是{head}（{change}）：为其阈值的 {size}。",
  hint: "点击可打开一个头。",
  limits: ({ share, nats, logits, ratio, map, errors }) =>
    `有变化：份额变化 ${whole(100 * share)} 个百分点，熵变化 ${figure(nats, 2)} nats，键数、距离或值的范数变化 × ${figure(ratio)}，logit 变化 ${whole(logits)}，或 ${percent(map)} 的注意力落在别处；并且超过 ${whole(errors)} 个标准误。`,
  sharper: (change) => `更集中：${change}`,
  broader: (change) => `更分散：${change}`,
  only: "只显示发生变化的头",
  showMore: (count) => `再显示 ${whole(count)} 个`,
  shown: (shown, of) => `${whole(shown)} / ${counted(of, "head")}`,
  a: "A",
  b: "B",
  difference: "B − A",
  differenceOf: (head) => `${head}：B − A`,
  sideOf: (side, name) => (side === name ? side : `${side}：${name}`),
  scales: "B − A：橙色表示 B 中注意力更多，紫色表示更少。A 和 B 共用一个颜色刻度。",
  change: (name, before, after) => `${name} ${before} → ${after}`,
  mapScale: (scale) => (scale === "log" ? "A 和 B 的刻度为对数，跨四个数量级；B − A 的刻度为线性。" : "所有刻度均为线性。"),
  mapChange: (share) => `热图：${share} 的注意力落在别处`,
  receivedChange: (share) => `得到的注意力：${share} 转到其他词元`,
  brokenChange: (before, after) => `含有 NaN 或无穷大的行 ${whole(before)} → ${whole(after)}`,
  moved: "有变化",
  valuesOnly: "只有值的范数变化，注意力没有变化",
  still: "无变化",
  label: (head, moved, what) => `${head}，${moved ? "有变化" : "无变化"}${what && `：${what}`}`,
  back: "← 所有变化",
  nearby: "列表中的头",
  previous: "列表中的上一个头",
  next: "列表中的下一个头",
  at: (at, of) => `${whole(at)} / ${whole(of)}`,
  statistics: "这个头在 A 和 B 中的统计",
  columns: { name: "查询平均", before: "A", after: "B", change: "B − A", size: "阈值的倍数" },
  map: "热图：落在别处的注意力份额",
  received: "得到的注意力：转到其他词元的份额",
  broken: "含有 NaN 或无穷大的行",
  notMoved: "不足 3 个标准误",
  sizeHelp: "以阈值为单位的变化。达到 1 且超过三个标准误时，这个头就算发生了变化。",
  noDifference: "A 和 B 的热图大小不同，因此没有差值热图。请比较长度相同的记录。",
  noMaps: "未记录热图，因此只比较统计。用 Observe(map=64) 可记录热图。",
  csv: "CSV",
  signed: withSign,
  segment: (query, key) => `${query} → ${key}`,
  layer: (name) => `第 ${name} 层`,
  heads: (layer, more) => `第 ${layer} 层的 ${counted(more, "head")}`,
  different: (what, [a, b]) =>
    `${{ runs: "前向计算次数", lookedAt: "测量的查询数", keys: "长度", first: "最前面的键数", bins: "热图区间数" }[what]}不同：A 为 ${span(a)}，B 为 ${span(b)}。`,
  unlikeMaps: (all) => (all ? "A 和 B 的热图大小不同，因此只比较统计。" : "A 和 B 的一些热图大小不同，因此不比较它们。"),
  rough: "热图以 8 位保存，因此落在别处的注意力份额可能相差至多 2 个百分点。",
  otherCells: "因此 B 中一个单元格包含的词元数不同，其平均权重也会因此不同。",
  otherSample: "在 A 和 B 测量的查询份额不同之处，不比较热图。",
  otherSegments: "片段的名称不同，因此不比较片段。",
  noSpread: "单个文本的页面不保存各行的离散程度，因此超过阈值的变化都算数。",
  onlyIn: (side, names) => `只在 ${side} 中：${names.join("、")}。`,
  unchecked: (which) => `${which === "AB" ? "A 和 B" : which} 没有注明模型，因此 headscope 无法检查二者是否属于一起。`,
  otherModel: (a, b, same) => `这些记录来自不同的模型：${a} 和 ${b}${same ? "（配置不同）" : ""}。请比较同一架构的记录。`,
  otherHeads: (layer, a, b) => `第 ${layer} 层${a === b ? "在另一份记录中是另一部分头" : `在这里有 ${whole(a)} 个头，在另一份记录中有 ${whole(b)} 个`}。请比较同一架构的记录。`,
  otherWidths: (layer, a, b) => `第 ${layer} 层的头在这里有 ${whole(a)} 维，在另一份记录中有 ${whole(b)} 维。请比较同一架构的记录。`,
  noLayers: (a, b) => `这些记录没有共同的层（第一层分别是 ${a}、${b}）。请比较同一模型的记录。`,
};

export const links: Translation["links"] = {
  onThisDisk: "本页是这台计算机上的文件，因此链接只在这里有效。要分享，请发送该文件和以下内容：",
  copyPart: "复制文件名和视图",
  lacks: (file) => `链接只打开本页。B 需要重新拖放：请一并发送 ${file}。`,
  awaited: (file) => `此链接与 ${file} 比较。请把该文件拖放到这里，或选择它。`,
  choose: "选择文件…",
  without: "不用它继续",
};

export const dropped: Translation["dropped"] = {
  here: "把 headscope 的记录或页面拖放到这里，与本页比较。",
  reading: (file) => `正在读取 ${file} …`,
  comparing: (file, head, of) => `正在比较 ${file}：第 ${whole(head)} 个头，共 ${whole(of)} 个 …`,
  cancel: "取消",
  close: "关闭",
  one: (count) => `请一次只拖放一个文件，而不是 ${whole(count)} 个。`,
  empty: (file) => `${file} 是空文件。`,
  unreadable: (file) => `无法读取 ${file}。请拖放文件，而不是文件夹。`,
  foreign: (file) => `${file} 不是 headscope 的记录。请拖放 headscope 保存的 .safetensors 文件，或它的 .html 页面。`,
  truncated: (file) => `${file} 被截断：缺少末尾部分。请重新复制或保存。`,
  damaged: (file, what) => `${file} 已损坏（${what}）。请重新复制或保存。`,
  newer: (file) => `${file} 由更新版本的 headscope 保存。请用该版本重新生成本页。`,
  changed: (file) => `${file} 在页面读取时被更改。请重新选择。`,
  tooLarge: (file, most) => `${file} 对本页来说太大，本页至多读取 ${whole(most)} MiB 的统计和热图。请用：headscope report A B。`,
  lacks: (name) => `缺少 ${name}`,
  overlap: "张量与文件大小不符",
  header: "文件头",
  pageData: "数据",
  contents: "内容",
};

export const history: Translation["history"] = {
  title: "训练过程中的每个头",
  keys: "左右方向键移到另一步，Home 和 End 移到第一步和最后一步。在热图中，上下方向键选择头。",
  hint: "每一行是一个头，每一列是一步。点击可选中头和步。",
  startsHint: "细线标出又一次 watch 的开始。",
  quantity: "显示",
  rows: "行",
  ranks: { layer: "按层", change: "变化最大的在前", alarm: "最早警报的在前" },
  step: (step) => `第 ${whole(step)} 步`,
  side: (step, name) => `第 ${whole(step)} 步，${name}`,
  slider: "步",
  axis: "步",
  before: "上一个警报",
  after: "下一个警报",
  flags: { "entropy collapse": "熵坍缩", "growing logits": "logit 增大", "rising sink": "汇聚点增强" },
  marks: { "entropy collapse": "▼", "growing logits": "▲", "rising sink": "◆" },
  does: {
    "entropy collapse": (name, step) => `${name} 在第 ${step} 步坍缩`,
    "growing logits": (name, step) => `${name}：logit 在第 ${step} 步变得过大`,
    "rising sink": (name, step) => `${name} 在第 ${step} 步转向第一个词元`,
  },
  change: {
    "entropy collapse": (before, value, limit) => `归一化熵 ${before} → ${value}（低于 ${limit} 报警）`,
    "growing logits": (before, value, limit) => `最高 logit ${before} → ${value}（高于 ${limit} 报警）`,
    "rising sink": (before, value, limit) => `第一个词元上的权重 ${before} → ${value}（高于 ${limit} 报警）`,
  },
  valueAt: (value, step) => `${value}（第 ${whole(step)} 步）`,
  more: (count, step, tied) => `到第 ${step} 步另有 ${whole(count)} 个头${tied > 0 ? `，其中 ${whole(tied)} 个在同一步` : ""}`,
  quiet: (steps) => `${counted(steps, "step")}中没有警报。`,
  unwatched: "未要求警报：watch(alarms=True) 可启用警报。",
  changed: (name, quantity) => `${quantity}变化最大：${name}`,
  rises: (step, heads, of) => `从第 ${step} 步起，${of} 个头中有 ${heads} 个的熵上升`,
  riseOf: (name, before, after) => `最多：${name}，归一化熵 ${before} → ${after}`,
  open: "显示这一步的这个头",
  openHead: "显示这个头",
  head: (name) => `头 ${name}`,
  named: (number, layer) => `头 ${number}（${layer}）`,
  only: (head) => `头 ${head}`,
  short: (layer, head) => `${layer}.${head}`,
  mapLabel: (quantity, count, steps) => `${quantity}的热图：${counted(count, "head")}，${counted(steps, "step")}。上下方向键选择头，左右方向键选择步。`,
  gridTitle: (step) => `第 ${whole(step)} 步的所有头`,
  gridLabel: (quantity, step, low, high) => `第 ${whole(step)} 步所有头的${quantity}：${low} 到 ${high}。方向键选择头。`,
  gridAxes: "行是层，列是头。",
  value: (name, step, quantity, value) => `${name}，第 ${whole(step)} 步：${quantity} ${value}`,
  alarm: (what, value, limit) => `${what}：${value}（界限 ${limit}）`,
  bands: (quantity) => `${quantity}，所有头`,
  bandLabel: (quantity, step, parts) =>
    `所有头的${quantity}。第 ${whole(step)} 步：最小 ${parts[0]}，10% ${parts[1]}，中位数 ${parts[2]}，90% ${parts[3]}，最大 ${parts[4]}。`,
  bandHint: "阴影：所有头，较深处为 10–90%。线：中位数。红色：所选的头。虚线：警报的界限。",
  limit: (value) => `警报 ${value}`,
  curves: (name) => `${name}：所有统计量`,
  curveLabel: (quantity, name, step, value, low, high) => `${name}的${quantity}：第 ${whole(step)} 步为 ${value}；从 ${low} 到 ${high}。`,
  stored: (of) => {
    const every = of.stride > 1 ? `，每 ${of.stride} 步一个值` : "";
    if (of.bits === 32) return "";
    const error = (of.high - of.low) / 252 / 2;
    const size = of.scale === "linear" ? `± ${figure(error, 2)}` : `± ${percent(error)}（0 附近 ± ${figure(error * of.pivot, 2)}）`;
    return `以 8 位保存${every}：${size}。`;
  },
  logScale: "对数刻度。",
  log: "对数",
  table: {
    title: (count) => counted(count, "alarm"),
    hint: "每个警报只发出一次，值回到界限之内以后才会再次发出。“此前”是与该值比较的值：迄今最大的归一化熵、最初的 logit、迄今最小的第一个词元上的权重。点击头可查看它。",
    columns: { step: "步", head: "头", what: "警报", value: "值", limit: "界限", before: "此前" },
    more: (count) => `另有 ${whole(count)} 个，见历史文件`,
  },
};
