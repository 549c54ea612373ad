// The measures that the picture can show: grouped by the question that they answer, each with one explanatory line.

import { data, OWN_SHARE } from "./data";
import { shares, state } from "./state";

const [SINCE_INPUT, ONE_LAYER] = ["All layers since the input", "One layer"];
/** One measure that answers each question is enough to begin with; the others are for a comparison. */
const GROUPS: Record<string, string[]> = {
  [SINCE_INPUT]: [OWN_SHARE, "parts", "alti_rollout"],
  [ONE_LAYER]: [data.method, "alti"],
};

/** The measures by the titles of their groups: five by their question, the others last. */
export const shareGroups: Record<string, string[]> = (() => {
  const grouped = Object.entries(GROUPS).map(([title, names]): [string, string[]] => [
    title,
    names.filter((name) => shares.includes(name)),
  ]);
  const first = new Set(grouped.flatMap(([, names]) => names));
  const more = shares.filter((name) => !first.has(name));
  return Object.fromEntries([...grouped, ["More", more] as const].filter(([, names]) => names.length > 0));
})();

const RATIO = "the length of what other tokens contribute, divided by that plus the length of the token's own part";
const EXPLANATIONS: Record<string, string> = {
  [OWN_SHARE]:
    "How far the vector moves if its own word is exchanged, divided by that plus how far it moves if all other words are.",
  parts:
    "The vector as a sum of one part for each token of the input: the length of its own part, divided by that plus the length of the other tokens' sum.",
  attention: "The mean of the heads' attention weights; the vectors that they weight do not count.",
  contribution_weights:
    "The projection of each weighted value vector on what attention adds, relative to its squared length (Cunningham and Cirone, 2026).",
  norm: "The lengths of the weighted value vectors that attention adds up.",
  value_zeroing: "How much the direction of the layer's output changes if a token's value vector is set to zero.",
  value_zeroing_without_bias:
    "How much the direction of the layer's output changes if a token's value vector is replaced by the bias of the values.",
  alti: "How much nearer to the vector after attention each token's part brings the sum, by distance (Ferrando et al., 2022).",
  globenc:
    "The length of each token's part after attention, both skip connections and LayerNorms (Modarressi et al., 2022).",
  attn_w: "The attention weight of all other tokens, averaged over heads; the vectors that they weight do not count.",
  attnres_w: "The attention weight of all other tokens, averaged over heads, with the skip connection counted as half.",
  attn_n: `In what attention adds to the vector: ${RATIO}.`,
  attnres_n: `After attention and the skip connection: ${RATIO}.`,
  attnresln_n: `After attention, skip connection and LayerNorm: ${RATIO}.`,
  enc_n: `After both skip connections and LayerNorms: ${RATIO}.`,
  layer_n: `After the whole layer: ${RATIO}.`,
};
const ROLLOUT = "_rollout";

/** One line on what a measure is; of a rollout, on what is multiplied. */
export function explainShare(name: string): string {
  if (!name.endsWith(ROLLOUT)) return EXPLANATIONS[name];
  const factor = name.slice(0, -ROLLOUT.length);
  return `The shares of one layer (${data.labels.matrices[factor] ?? factor}), multiplied over all layers since the input.`;
}

export const shareText = () => explainShare(state.share.value);
