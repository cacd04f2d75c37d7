// Chinese, continued: the help, the tour and the glossary.

import type { Translation } from "./languages";

export const help: Translation["help"] = {
  title: "帮助",
  close: "关闭",
  keysTitle: "按键",
  keys: [
    ["?", "打开此帮助"],
    ["/", "查找词元、位置或头"],
    ["Tab", "到页面的下一部分"],
    ["← ↑ ↓ →", "所有头、视图、词元：移到相邻项"],
    ["Enter", "打开头，或选中词元"],
    ["← ↑ ↓ →", "单个头：切换头或层"],
    ["Shift + ← ↑ ↓ →", "在热图上：移动所选单元格"],
    ["+ − 0", "在热图上：放大、缩小、显示全部"],
    ["Esc", "关闭、清除选择或返回所有头"],
  ],
  page: "本页",
  takeTour: "开始导览（20 秒）",
  glossary: "术语表",
};

export const tour: Translation["tour"] = {
  label: "导览",
  step: (at, of) => `${at} / ${of}`,
  next: "下一步",
  back: "上一步",
  done: "完成",
  leave: "退出导览",
  steps: {
    changes: "两份记录：发生变化的头，变化最大的在前。点击可打开一个头，查看 A、B 及二者之差。",
    happened: "先看什么：最早的警报。点击可显示该头在警报那一步的情况。",
    steps: "整个训练过程：每一行是一个头，每一列是一步。标记是警报。",
    slider: "用滑块或左右方向键选择一步。",
    step: "所选步的所有头，以及所选头的曲线。",
    findStep: "查找头或步。按 / 可到这里，按 ? 打开帮助，其中有术语表。",
    cards: "先看什么：突出的头，每个用一句话说明。点击可打开该头并选中一个例子。",
    grid: "所有头：每个头一幅小热图。行是层，列是头。颜色越深注意力越强；在深色页面上则越亮越强。",
    map: "单个头：每一行是发出注意力的词元，每一列是被关注的词元。将指针移到单元格上可读出权重，点击可选中它。",
    pictures: "单个头：所选图块关注什么、什么关注它，以及平均。点击图块可选中它。",
    beside: "这里列出所选词元关注什么、为什么，以及这个头的统计。",
    reading: "文本：连线从每个词元指向它关注的词元。",
    find: "查找词元、位置或头。按 / 可到这里，按 ? 打开帮助，其中有按键说明和术语表。",
  },
};

export const glossary: Translation["glossary"] = {
  title: "术语表",
  back: "所有术语",
  hint: "每幅图是八个词元的热图：每行一个查询，每列一个键。有标记的单元格得到权重。",
  open: (name) => `${name}：含义`,
  patterns: "模式",
  statistics: "统计量",
  words: "术语",
  example: (letters) => `图中的词元：${letters}`,
  picture: (name, does) => `“${name}”模式的热图：${does}`,
  entries: {
    previous: "每个词元关注紧邻其前的一个。",
    next: "每个词元关注紧邻其后的一个。只有可以看到后文的模型才能这样做。",
    self: "每个词元关注自身。",
    duplicate: "每个词元关注自身之前的出现处。",
    induction: "每个词元关注它上一次出现之后的那个词元。这样模型就能续写读过的文本。",
    "fixed key": "每个词元都关注同一个词元，例如句号或 [SEP]，无论它在哪里。",
    first: "每个词元都关注第一个。许多头把用不上的注意力放在那里：注意力汇聚点（attention sink）。",
    local: "每个词元均匀关注相距至多 3 个位置的邻居。",
    uniform: "每个词元均匀关注它可以关注的所有词元。",
  },
  terms: {
    attention: ["注意力", "词元从其他词元读取信息。权重表示从每个词元读取多少，总和为 1。"],
    head: ["头", "选择读取内容的一种方式。一层有多个并行工作的头。"],
    query: ["查询", "进行读取的词元：热图的一行。"],
    key: ["键", "可被读取的词元：热图的一列。"],
    weight: ["权重", "查询的注意力落在某个键上的份额，从 0 到 1。"],
    mask: ["掩码", "规定查询可以关注哪些键。因果掩码隐藏所有后面的词元。"],
    softmax: ["softmax", "把查询的得分变成权重的函数。"],
    match: ["匹配度", "头与某个模式的符合程度：100% = 完全符合，0% = 不高于随机水平。低于 50% 时名称带“部分”。"],
  },
  units: {
    entropy: "奈特（nat）", normalized_entropy: "0 到 1", max_weight: "0 到 1", effective_keys: "键的个数", mass: "0 到 1", distance: "位置数或图块数", previous: "0 到 1", next: "0 到 1",
    self: "0 到 1", duplicate: "0 到 1", induction: "0 到 1", first: "0 到 1", lse: "对数", max_logit: "logit", chance: "0 到 1", value_norm: "长度", second_weight: "0 到 1",
    recall: "0 到 1", recall_kl: "奈特（nat）", largest_selected: "0 或 1",
  },
  unit: (unit) => `单位：${unit}。`,
  received: ["得到的注意力", "一个键从可以关注它的各查询得到的平均权重：热图上方的柱形。"],
};
