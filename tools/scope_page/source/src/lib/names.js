// Names of recorded values as people read them; where they are shown, the recording's own name stands in the title.
import { ui } from './state.svelte.js';

const NAMES = {
  activation_rms: ['Activation RMS', '激活 RMS'], activation_max: ['Largest activation', '最大激活'], attention_entropy: ['Attention entropy', '注意力熵'],
  attention_logit_max: ['Largest attention logit', '最大注意力 logit'], gradient_norm: ['Gradient norm', '梯度范数'], weight_norm: ['Weight norm', '权重范数'],
  update_ratio: ['Update over weight', '更新与权重之比'], residual_growth: ['Residual growth', '残差增长'], outlier_channels: ['Outlier channels', '离群通道'],
  not_finite: ['Values not finite', '非有限值'], embedding_norm: ['Embedding norm', '嵌入范数'], loss_per_position: ['Loss by position', '按位置的损失'],
  validation_loss: ['Validation loss', '验证损失'], router_entropy: ['Router entropy', '路由熵'], expert_load: ['Expert load', '专家负载'],
  dead_experts: ['Experts without a token', '无词元的专家'], overloaded_experts: ['Overloaded experts', '过载专家'], moments: ['Mean', '均值'], histogram: ['Histogram', '直方图'],
  name: ['Model', '模型'], num_layers: ['Layers', '层数'], hidden_size: ['Hidden size', '隐藏维度'], num_attention_heads: ['Attention heads', '注意力头'],
  num_query_groups: ['Query groups', '查询组'], num_experts: ['Experts', '专家数'], vocab_size: ['Vocabulary', '词表'], seq_length: ['Sequence length', '序列长度'],
  micro_batch_size: ['Micro-batch size', '微批大小'], params_dtype: ['Precision', '精度'], interval: ['Recorded every', '记录间隔'],
  residual: ['Residual stream', '残差流'], mlp: ['MLP output', 'MLP 输出'], mlp_hidden: ['MLP hidden', 'MLP 隐藏层'], context: ['Attention output', '注意力输出'], activation: ['Activation', '激活'],
  gradient: ['Gradient', '梯度'], attention: ['Attention', '注意力'], query: ['Queries', '查询'], key: ['Keys', '键'], value: ['Values', '值'],
  rank: ['Rank', '秩'], host: ['Host', '主机'], node: ['Node', '节点'], pid: ['Process', '进程'], ended: ['Ended', '已结束'], tp: ['TP', 'TP'], pp: ['Stage', '级'],
  dp: ['DP', 'DP'], cp: ['CP', 'CP'], ep: ['EP', 'EP'],
};

export function named(key) {
  const found = NAMES[key];
  return found ? found[ui.language === 'zh' ? 1 : 0] : key;
}
