// Texts of the page: English is the key.
import { ui } from './state.svelte.js';

const ZH = {
  Run: '运行', Topology: '拓扑', Timeline: '时间线', Model: '模型', Tensor: '张量', Attention: '注意力', Tokens: '词元',
  Experts: '专家', Generate: '生成', Replay: '回放', Lab: '实验台',
  live: '实时', ended: '已结束', recording: '记录', 'exported page': '导出页面', 'not connected': '未连接',
  'View only': '只读', Control: '控制', Pause: '暂停', Resume: '继续', 'Step once': '走一步', paused: '已暂停',
  step: '步', steps: '步', newest: '最新', 'Follow the newest step': '跟随最新一步', following: '跟随中',
  Loss: '损失', 'Gradient norm': '梯度范数', 'Learning rate': '学习率', 'Tokens per second': '每秒词元', 'Step time': '每步时间',
  Memory: '显存', 'Time left': '剩余时间', Dropped: '丢弃', Alerts: '警报', 'No alert so far.': '目前没有警报。',
  'Loss by position in the sequence': '按序列位置的损失', nats: '奈特', tokens: '词元', Parameters: '参数量', Progress: '进度',
  'frames not recorded': '帧未记录', perturbed: '受扰动', 'log scale': '对数坐标', 'most of any rank': '各秩最大值', 'of the slowest rank': '最慢的秩',
  Help: '帮助', Theme: '主题', Language: '语言', 'Export HTML': '导出 HTML', Close: '关闭', Keyboard: '键盘',
  'Nothing recorded yet': '尚无记录', Loading: '载入中', 'This view failed': '此视图失败', 'not in this export': '此导出页面中没有',
  Module: '模块', Class: '类', Last: '末值', 'First NaN': '首个 NaN', 'no value that is not finite': '无非有限值', Statistic: '统计量',
  Filter: '筛选', Value: '值', Path: '路径', 'Choose a module to see all of its statistics.': '选择一个模块以查看其全部统计量。',
  Kind: '种类', Layer: '层', Head: '头', Sample: '样本', 'Micro-batch': '微批', Shape: '形状', Histogram: '直方图', Outliers: '离群通道',
  Channel: '通道', Largest: '最大值', 'over RMS': '相对 RMS', Mean: '均值', Deviation: '标准差', RMS: 'RMS', Lowest: '最小', Highest: '最大',
  'Encoding error': '编码误差', Missing: '缺失', Elements: '元素', 'largest of a block': '块内最大', 'mean of a block': '块内均值',
  'layers × heads': '层 × 头', query: '查询', key: '键', row: '行', column: '列', channel: '通道', token: '词元', Fit: '适合窗口',
  Place: '位置', 'Coloured by': '着色依据', Entropy: '熵', 'Top candidates': '最可能的候选', 'Logit lens': 'Logit 透镜', Projection: '投影',
  'basis of step': '基底取自第', explained: '解释方差', Text: '文本',
  Rank: '秩', Ranks: '秩', Host: '主机', Findings: '诊断结果', 'Nothing found': '未发现异常', Verdict: '判定', 'Silent for': '静默时间',
  'weak signal': '弱信号', claim: '结论', stage: '级', confidence: '置信度', Brightness: '亮度',
  'Tokens of each expert': '每个专家的词元数', 'over the mean': '相对均值', 'Router entropy': '路由熵', Dead: '闲置', Overloaded: '过载', Imbalance: '不均衡',
  Expert: '专家', 'over the steps': '随步数', Router: '路由器',
  Prompt: '提示', 'New tokens': '新词元数', Temperature: '温度', 'Top k': 'Top k', Seed: '种子', Probability: '概率', Alternatives: '候选',
  'Type a prompt; the current weights go on with it.': '输入提示，由当前权重续写。', Generating: '生成中',
  Bookmarks: '书签', 'Add bookmark': '添加书签', 'Compare with': '对比', 'no other run': '无其他运行', 'first difference': '首个差异', Play: '播放', Stop: '停止',
  speed: '速度', Note: '备注', 'What was recorded at this step': '此步的记录',
  Preview: '预览', Arm: '启用', Disarm: '停用', Undo: '撤销', Target: '目标', Armed: '已启用', 'Nothing is armed.': '没有启用的扰动。',
  'Paired run': '配对运行', 'from step': '从步', 'to step': '到步', Pattern: '模块匹配', Perturbation: '扰动', Answer: '回答',
  weight: '权重', activation: '激活', gradient: '梯度', communication: '通信',
  'Control token': '控制令牌', 'This needs the control token.': '此操作需要控制令牌。', 'Give up control': '放弃控制', Take: '取得', Cancel: '取消',
  slices: '片段', 'clock error': '时钟误差', 'Newest steps': '最新几步', Earlier: '更早', Later: '更晚', 'Steps shown': '显示步数',
  waiting: '等待中', acting: '作用中', over: '已结束', work: '计算', modules: '模块', device: '设备', microbatch: '微批', forward: '前向', backward: '反向', optimizer: '优化器', data: '数据', checkpoint: '检查点', other: '其他', pause: '暂停', layer: '层', module: '模块', collective: '集合通信', p2p: '点对点', kernel: '内核', 'weight_gradient': '权重梯度',
  'the session has ended': '会话已结束', 'this tab has no session': '此标签页没有会话', 'Open the page again with': '请重新打开：',
  'Validation loss': '验证损失', Axis: '横轴', Smoothing: '平滑', none: '无', training: '训练', validation: '验证', time: '时间', 'nats per token': '每词元奈特', 'before clipping': '裁剪前', 'Record now': '立即记录', 'mean over heads': '各头均值', masked: '被掩蔽', 'a step looked at': '所看的步',
  Watch: '观察', Send: '发送', light: '浅色', dark: '深色', auto: '自动', Requests: '观察请求', value: '值', 'loss': '损失', entropy: '熵',
};

export function t(text) {
  return ui.language === 'zh' ? (ZH[text] ?? text) : text;
}

// Longer texts come in both languages where they are used.
export function say(english, chinese) {
  return ui.language === 'zh' ? chinese : english;
}
